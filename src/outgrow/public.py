"""The public names: the table of contents of the package."""

from outgrow.anatomy import volumes as volumes
from outgrow.blocks import ResidualBlock as ResidualBlock
from outgrow.compare import Comparison as Comparison
from outgrow.compare import compare as compare
from outgrow.errors import GrowthError as GrowthError
from outgrow.folded import Fold as Fold
from outgrow.grow import Growth as Growth
from outgrow.grow import deepen as deepen
from outgrow.grow import grow as grow
from outgrow.grow import kernel as kernel
from outgrow.grow import widen as widen
from outgrow.methods import R2R as R2R
from outgrow.methods import MeanFill as MeanFill
from outgrow.methods import Net2Net as Net2Net
from outgrow.methods import NetMorph as NetMorph
from outgrow.methods import RandomPad as RandomPad
from outgrow.training.checkpoint import load as load
from outgrow.training.checkpoint import save as save
from outgrow.training.fade import PActivation as PActivation
from outgrow.transforms.deepen import Deepen as Deepen
from outgrow.transforms.deepen import places as places
from outgrow.transforms.kernel import Kernel as Kernel
from outgrow.transforms.widen import Widen as Widen
from outgrow.zeroing import zero_init as zero_init
