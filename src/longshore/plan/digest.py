"""The digest of a plan: a name for what was decided, which all ranks compare.

In: a setting, the sequences and the rounds. Out: 64 hex digits. Equal digests mean the same tensors
on every rank in every round, and the same collectives in the same order. With tp 2 instead of 1 the
same rounds have another digest: a rank holds half of a lane's rows.
"""

import hashlib
from collections.abc import Sequence as Seq

from longshore.plan.types import PlanSetting, Round, Sequence

DIGESTED = ("lanes", "capacity", "align", "sync", "cp_sizes", "pp", "vpp")
"""What of a setting decides how rounds are run: a lane's shapes, the groups, the order of work."""


def plan_digest(setting: PlanSetting, sequences: Seq[Sequence], rounds: Seq[Round]) -> str:
    """It does not tell why rounds were chosen (policy, costs), nor which samples the sequences are.

    Only in a pipeline do costs decide how rounds are run: by them ranks order their messages.
    """
    lines = [f"{name} {getattr(setting, name)}" for name in DIGESTED]
    lines += [f"{name} {value}" for name, value in _parallel(setting).items() if value]
    if setting.planned_by.pads_to_longest:
        lines.append("padded to the longest")
    if setting.pp > 1:
        lines += [f"layout {setting.layout}", f"{setting.profile}", f"{setting.shares}"]
    if setting.pp > 1 and setting.synced:
        lines.append(f"token-wise {setting.shares.tokenwise}")
    lines.append(" ".join(str(sequence.length) for sequence in sequences))
    for round_ in rounds:
        lines.append("round")
        lines += [
            f"{pack.first_lane} {pack.cp_size} {pack.tokens_per_lane}: "
            f"{' '.join(map(str, pack.sequences))}"
            for pack in round_.packs
        ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _parallel(setting: PlanSetting) -> dict[str, str]:
    """What is left out where it is not used."""
    return {
        "tp": f"{setting.tp}" if setting.tp > 1 else "",
        "ep": f"{setting.ep}" if setting.ep > 1 else "",
        "buckets": " ".join(map(str, setting.buckets)),
        "curve": f"{setting.profile.curve or ''}",
    }
