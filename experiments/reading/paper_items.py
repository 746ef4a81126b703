"""What the paper defines, and where it is in outgrow: one entry per definition, transform and row of table 1.

`code` and `check` name files, or a test in a file behind "::"; a test checks that they exist. The verdict is "complete", or it
says in what outgrow differs. Results of experiments are no part of this list: their verdicts are computed (`against_paper.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

COMPLETE = "complete"
METHODS, COMPARE, MEASURE = (
    "tests/methods/test_methods.py",
    "tests/comparing/test_compare.py",
    "tests/comparing/test_measure.py",
)
PLAIN_TABLE = f"{COMPARE}::test_a_plain_network_agrees_with_the_papers_table"


@dataclass(frozen=True)
class Item:
    place: str
    text: str
    code: str
    check: str
    verdict: str = COMPLETE


DEFINITIONS = (
    Item(
        "Foreword",
        "The symmetry of new weights carries over to attention and transformers",
        "src/outgrow/transforms/widen/choose_heads.py",
        "tests/configuration/test_library_models.py",
        "complete: heads and hidden units grow by pairs, streams under layer norms in other ways (docs/methods.md)",
    ),
    Item(
        "§1",
        "Function preserving: f(x; θ_t) = g(x; θ_s) for all x",
        "src/outgrow/verify/outputs.py",
        f"{METHODS}::test_exact_methods_keep_the_function_on_fresh_inputs",
    ),
    Item(
        "§1, §3.3",
        "Efficient architecture search: candidates are grown from trained networks",
        "src/outgrow/search/search.py",
        "tests/search/test_search.py::test_a_child_computes_what_its_parent_does_before_it_is_trained",
        "complete: docs/search.md",
    ),
    Item(
        "§2, eq. 1–4",
        "Convolutions and linear layers as products of blocks; a layer is x = σ(W ∗ x + b)",
        "src/outgrow/analysis/rules/product.py",
        "tests/analysis/rules/test_layers.py",
    ),
    Item(
        "§2, eq. 5",
        "Non-linearities that treat channels alike and apart (MCD): activations, pooling, batch norm",
        "src/outgrow/analysis/effects.py",
        f"{COMPARE}::test_activations_are_recognised_by_their_results",
        "complete, and decided for each operator of the traced model instead of assumed",
    ),
    Item(
        "§3.1, eq. 6",
        "Net2WiderNet: copies whose outgoing weights are shared out",
        "src/outgrow/methods/net2net.py",
        f"{METHODS}::test_net2net_copies_units_and_shares_their_columns_out",
    ),
    Item(
        "§3.1",
        "Net2DeeperNet: an identity layer behind an idempotent activation",
        "src/outgrow/transforms/deepen/new_layers.py",
        f"{COMPARE}::test_net2net_deepens_behind_idempotent_activations",
    ),
    Item(
        "§5.1",
        "Net2DeeperNet with batch norm: its affine parameters undo it for one batch",
        "src/outgrow/transforms/deepen/new_layers.py",
        "tests/transforms/deepen/test_new_layers.py::"
        "test_a_batch_norm_is_made_the_identity_by_what_stood_there_before_code_that_works_in_place",
        "complete: exact in eval mode, and in train mode on batches with the statistics of the example",
    ),
    Item(
        "§3.2, eq. 7",
        "Network Morphism, widening: one of the two new kernels is zero",
        "src/outgrow/methods/netmorph.py",
        f"{METHODS}::test_netmorph_with_zero_writers",
        "complete: zero readers by default, zero writers on request",
    ),
    Item(
        "§3.2",
        "Network Morphism, deepening: one layer split in two",
        "src/outgrow/transforms/deepen/new_layers.py",
        f"{MEASURE}::test_degrees_of_freedom_of_a_split_layer",
    ),
    Item("§3.2", "Kernel size morphing", "src/outgrow/transforms/kernel.py", "tests/transforms/test_kernel.py"),
    Item(
        "§3.2, appendix F",
        "Sub-net morphing, with the zero initialisation of §4.3",
        "src/outgrow/transforms/branch.py",
        "tests/transforms/test_branch.py",
    ),
    Item(
        "§4.1, appendix C, figure 1",
        "R2WiderR, another solution of the equation of Network Morphism: W̄ = [W; U; U], b̄ = [b; c; c], V̄ = [V, A, −A]",
        "src/outgrow/methods/r2r.py",
        f"{METHODS}::test_r2r_makes_pairs_written_alike_and_read_with_opposite_signs",
    ),
    Item(
        "§4.2, figure 2",
        "Residual connections: r(x̄) = x + x_L − x_R",
        "src/outgrow/transforms/widen/fold_residual.py",
        "tests/transforms/widen/test_fold_residual.py",
        'complete, as residual="fold"; by default the whole stream grows instead',
    ),
    Item(
        "§5.2",
        "Residual connections for Network Morphism “almost identically”; for Net2Net “not straightforward”",
        "src/outgrow/modules/fold.py",
        "tests/transforms/widen/test_regrow_folds.py",
        "complete, for Net2Net too",
    ),
    Item(
        "Appendix C",
        "Residual connections with down-sampling and repeated widening",
        "src/outgrow/modules/fold.py",
        "tests/transforms/widen/test_fold_residual.py",
    ),
    Item(
        "§4.3",
        "Zero initialisation from dense weights; σ(0) = 0 at the end",
        "src/outgrow/exactness/zero_output.py",
        "tests/exactness/test_zero_output.py::test_the_output_is_zero_and_learns",
        "differs: a ReLU at the end is refused, since nothing before it would learn; a batch norm there is closed by γ = 0",
    ),
    Item(
        "Appendix C",
        "Zero initialisation where σ(b) = 0 at some b; none where σ is never zero (sigmoid)",
        "src/outgrow/exactness/constants_through.py",
        "tests/exactness/test_constants_through.py",
        "complete where σ has a slope at b, which is found by evaluating σ",
    ),
    Item(
        "§4.4, §5.2, figure 3",
        "R2DeeperR: x_e = z(x) + x with z = 0, a whole residual block",
        "src/outgrow/transforms/deepen/own_kind.py",
        "tests/transforms/deepen/test_own_kind.py",
        'complete; method="r2r-paper" closes a branch behind a batch norm by pairs, as written',
    ),
    Item(
        "§5.1",
        "P-activations, which fade from the identity to the activation",
        "src/outgrow/modules/gates.py",
        "tests/modules/test_gates.py::test_any_new_activation_is_exact_if_it_fades_in",
        "complete: for activations that a growth brings, and for those in copies of blocks (docs/deepen.md)",
    ),
    Item(
        "§5.3",
        "Teacher and student may share parameters, so that several sizes are trained at once",
        "src/outgrow/families/family.py",
        "tests/families/test_family.py::test_gradients_of_all_sizes_meet_in_the_shared_parameters",
        "complete: docs/families.md",
    ),
    Item(
        "§6",
        "Widening: initial values with the standard deviation s of the kernel they join",
        "src/outgrow/methods/base.py",
        f"{METHODS}::test_free_values_have_the_deviation_of_the_tensor_they_join",
        "differs: drawn from ±s√3, whose deviation is s; the printed ±s/√3 has s/3",
    ),
    Item(
        "§6",
        "Deepening: initial values with the deviation of the kernel before",
        "src/outgrow/transforms/deepen/own_kind.py",
        "tests/transforms/deepen/test_own_kind.py",
        "differs: a new block starts from the values of the block that it copies; one that copies none from torch’s defaults",
    ),
    Item(
        "§6, appendix E",
        "He initialisation",
        "src/outgrow/methods/base.py",
        f"{METHODS}::test_he_and_xavier_follow_the_fans_of_the_grown_layer",
    ),
    Item(
        "Appendix D, tables 3–4",
        "ResNetCifar-10(r), ResNetCifar-18(r) and the network of figure 4",
        "experiments/setting/models.py",
        "tests/experiments/test_training.py",
        "differs: stride one in Conv2_1, which the printed output sizes need and the printed stride two contradicts",
    ),
    Item(
        "Appendix D, table 5",
        "Every run with its hyper-parameters",
        "experiments/setting/arms.py",
        "tests/experiments/test_inputs.py",
        "complete; where paper, table and code disagree, the choice is named in `CHOICES`, the other one in `more_arms.py`",
    ),
    Item(
        "Appendix F",
        "A hybrid of R2R and Net2Net: pairs that are copies",
        "src/outgrow/methods/r2r.py",
        f"{METHODS}::test_r2r_from_copies_repeats_existing_units",
        'complete, as R2R(init="copy")',
    ),
    Item(
        "Appendix F",
        "Interplay of learning rate, weight decay, scale and optimizer at a growth",
        "experiments/setting/protocol.py",
        "tests/experiments/test_comparison.py::test_the_sweep_is_against_the_run_in_which_nothing_changes",
        "measured: the sweep of docs/results/does-it-pay.md",
    ),
    Item(
        "Appendix F",
        "Learned initial values",
        "src/outgrow/methods/learned.py",
        "tests/methods/test_learned.py",
        "complete: GradMax and North; at equal FLOPs no better than drawn values (docs/where-to-grow.md)",
    ),
)

TABLE_1 = (
    Item("Activations, deepening", "R2R: MCD, σ(0) = 0; Net2Net: idempotent", "src/outgrow/comparing/columns.py", PLAIN_TABLE),
    Item(
        "Activations, widening",
        "R2R, Net2Net: MCD; NetMorph: MCD, σ(0) = 0",
        "src/outgrow/comparing/columns.py",
        PLAIN_TABLE,
        "differs: NetMorph with zero readers needs no σ(0) = 0; with zero writers it does",
    ),
    Item(
        "Function preserving",
        "R2R, NetMorph: yes; Net2Net: in expectation",
        "src/outgrow/comparing/measure.py",
        PLAIN_TABLE,
        "differs: Net2Net is exact here, up to rounding",
    ),
    Item(
        "Requires noise",
        "Net2Net only",
        "src/outgrow/comparing/symmetry_breaking.py",
        f"{MEASURE}::test_noise_is_needed_where_training_keeps_new_units_equal",
        "differs: Net2Net needs none if shares are drawn at random",
    ),
    Item(
        "Residual connections",
        "R2R only",
        "src/outgrow/comparing/compare.py",
        f"{COMPARE}::test_a_residual_stream",
        "differs: whole streams are widened by every method",
    ),
    Item(
        "Degrees of freedom",
        "R2R, NetMorph: half; Net2Net: none",
        "src/outgrow/comparing/measure.py",
        f"{MEASURE}::test_degrees_of_freedom_are_the_dimension_of_what_can_be_drawn",
        "differs: NetMorph’s are those of the side that is not zero, 3 % or 97 % in the example of docs/methods.md",
    ),
    Item(
        "Preserves existing parameters",
        "R2R, NetMorph: yes; Net2Net: no",
        "src/outgrow/comparing/measure.py",
        f"{MEASURE}::test_existing_parameters_that_change_are_named",
    ),
    Item(
        "Number of new layers",
        "R2R: two or more; Net2Net: any",
        "src/outgrow/transforms/deepen/new_layers.py",
        "tests/transforms/deepen/test_new_layers.py",
    ),
    Item(
        "Number of new channels",
        "R2R: even; Net2Net, NetMorph: any",
        "src/outgrow/methods/r2r.py",
        f"{MEASURE}::test_counts_of_new_channels_are_those_that_can_be_added",
    ),
)

FIGURES = (
    Item(
        "Figures 1–3",
        "Schemes of R2WiderR, its residual connections, R2DeeperR",
        "docs/transforms/r2r.svg",
        "tests/docs/test_pictures.py",
        "complete, drawn from growths of small networks: docs/transforms.md",
    ),
    Item(
        "Figure 4",
        "Filters after the growth and at the end",
        "experiments/figures.py",
        "tests/experiments/test_claims.py::test_what_becomes_of_filters",
        "complete: figures/filters.png, and measured in the report",
    ),
    Item(
        "Figures 5–6",
        "Convergence of widened and deepened students",
        "experiments/figures.py",
        "tests/experiments/test_report.py::test_the_committed_results_make_every_figure",
        "complete: figures/nct-widen.png, nct-deepen.png",
    ),
    Item(
        "Figure 7",
        "An overfitted teacher",
        "experiments/figures.py",
        "tests/experiments/test_report.py::test_the_committed_results_make_every_figure",
        "complete: figures/overfitting.png",
    ),
    Item(
        "Figure 8",
        "Growth in mid-training, by epochs and by FLOPs",
        "experiments/figures.py",
        "tests/experiments/test_report.py::test_the_committed_results_make_every_figure",
        "complete, and for widening, which the paper leaves out: figures/ftt-*.png",
    ),
    Item(
        "Figure 9, appendix B",
        "By updates and by FLOPs, with times",
        "experiments/figures.py",
        "tests/experiments/test_report.py::test_the_committed_results_make_every_figure",
        "complete: figures/appendix-b.png",
    ),
    Item(
        "Figure 10, appendix E",
        "Bad initialisation",
        "experiments/figures.py",
        "tests/experiments/test_report.py::test_the_committed_results_make_every_figure",
        "complete: figures/initialisation.png",
    ),
)
