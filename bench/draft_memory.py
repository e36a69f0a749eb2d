"""What undoing a verified step costs in memory at Kimi-K3's sizes: a record of corrections against copies of states.

Sizes come from the model's config and the code's own layout, not from a formula kept here.
"""

from __future__ import annotations

from pathlib import Path

from model.batch import FLOAT_BYTES
from model.config import load_config

K3 = Path(__file__).resolve().parent / "kimi_k3"
BLOCK_TOKENS = 512
TOKENS = 8
BF16_BYTES = 2
MIB = float(1 << 20)


def verification(tokens: int = TOKENS) -> dict[str, float]:
    """MiB of one request that verifies `tokens` tokens, by form.

    A record holds for every token, layer and head the normed key, the decay and the correction, and the convolutions'
    raw inputs beside them. `bf16`: keys and decays in bf16, corrections in fp32; the code at present keeps fp32.
    """
    layout = load_config(K3).pool_layout(BLOCK_TOKENS)
    positions = tokens * layout.num_kda_layers * layout.num_heads
    recurrence = positions * (2 * layout.key_dim + layout.value_dim)
    inputs = layout.record_floats(tokens) - recurrence
    assert inputs == tokens * layout.conv_floats // layout.conv_history, "the record holds something else too"
    bf16 = positions * (2 * layout.key_dim * BF16_BYTES + layout.value_dim * FLOAT_BYTES)
    return {
        "tokens": tokens,
        "record_recurrence_fp32_mib": recurrence * FLOAT_BYTES / MIB,
        "record_recurrence_bf16_mib": bf16 / MIB,
        "record_inputs_fp32_mib": inputs * FLOAT_BYTES / MIB,
        "record_inputs_bf16_mib": inputs * BF16_BYTES / MIB,
        "record_fp32_mib": layout.record_floats(tokens) * FLOAT_BYTES / MIB,
        "copies_recurrence_mib": tokens * layout.recurrent_floats * FLOAT_BYTES / MIB,
        "copies_mib": tokens * layout.slot_floats * FLOAT_BYTES / MIB,
    }


def show(found: dict[str, float]) -> None:
    print(f"\nverifying {found['tokens']} tokens of one request at Kimi-K3's sizes, MiB (from its config)")
    print(f"{'':<28}{'recurrence':>12}{'conv inputs':>13}")
    for form in ("fp32", "bf16"):
        recurrence, inputs = found[f"record_recurrence_{form}_mib"], found[f"record_inputs_{form}_mib"]
        print(f"{f'record, {form}':<28}{recurrence:>12.1f}{inputs:>13.1f}")
    copies = found["copies_recurrence_mib"]
    print(f"{'copies of the state, fp32':<28}{copies:>12.1f}{found['copies_mib'] - copies:>13.1f}")
    print(f"a record of the recurrence is {copies / found['record_recurrence_fp32_mib']:.0f} times smaller in fp32")


if __name__ == "__main__":
    show(verification())
