"""Settings that the tuning has chosen, for tests."""

from __future__ import annotations

from experiments.setting import protocol

TUNED = {kind: dict.fromkeys(protocol.tuned_at(kind), protocol.OWNED) for kind in protocol.KINDS}
