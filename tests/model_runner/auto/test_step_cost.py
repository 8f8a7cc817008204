"""What a step costs: counted by hand for a small model."""

from __future__ import annotations

from pathlib import Path

from checkpoints import make_checkpoint, make_qwen3_moe_checkpoint

from model_runner import ModelRunner


def test_operations_of_a_token_and_of_a_pair(tmp_path: Path) -> None:
    """Three layers, the second dense: 48 numbers wide, 4 heads (2 for keys) of 16, 3 of 8 experts of 24."""
    with ModelRunner(make_qwen3_moe_checkpoint(tmp_path), num_kv_blocks=4) as runner:
        cost = runner.split_cost
    attention = 48 * (4 + 2 + 2) * 16 + 4 * 16 * 48
    norms = (4 + 2) * 16  # of queries and keys, kept as a matrix
    sparse = 48 * 8 + 3 * (3 * 48 * 24)
    dense = 3 * 48 * 40
    assert cost.per_token == 2 * (3 * (attention + norms) + 2 * sparse + dense)
    assert cost.per_pair == 3 * 4 * 4 * 16
    assert cost.of(2, 5) == 2 * cost.per_token + (6 + 7) * cost.per_pair


def test_a_token_costs_no_more_pairs_than_its_window(tmp_path: Path) -> None:
    with ModelRunner(make_checkpoint(tmp_path, "Mixtral", sliding_window=5), num_kv_blocks=4) as runner:
        cost = runner.split_cost
    assert cost.of(2, 4) == 2 * cost.per_token + (5 + 5) * cost.per_pair


def test_latent_attention_costs_its_expanded_heads(tmp_path: Path) -> None:
    """Three layers, 4 heads of 12 + 8 numbers for keys and 10 for values; of 8 experts 3 are chosen, 2 are shared."""
    with ModelRunner(make_checkpoint(tmp_path, "DeepseekV2"), num_kv_blocks=4) as runner:
        cost = runner.split_cost
    attention = 48 * (20 + 24 + 8) + 20 * 4 * (12 + 8) + 24 * 4 * (12 + 10) + 4 * 10 * 48
    sparse = 48 * 8 + 3 * (3 + 2) * 48 * 24
    assert cost.per_token == 2 * (3 * attention + 2 * sparse + 3 * 48 * 40)
    assert cost.per_pair == 3 * 2 * 4 * (12 + 8 + 10)
    assert cost.per_expanded == 3 * 2 * 4 * 24 * (12 + 10)
    assert cost.per_absorbed_pair == 3 * 2 * 4 * (24 + 24 + 8)
    assert cost.of(1, 9) == cost.per_token + 10 * cost.per_absorbed_pair, "a decode expands nothing"
    pairs = 40 * 9 + 40 * 41 // 2
    assert cost.of(40, 9) == 40 * cost.per_token + 9 * cost.per_expanded + pairs * cost.per_pair
    assert cost.per_sent == 0, "one rank sends nothing"
