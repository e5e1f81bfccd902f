"""Tables of library operators: sizes, work, files; language models as lists of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.errors import NetworkError, ProgramError
from cdmpp.program.llm import MODELS, is_config, load_decoder
from cdmpp.program.operators import attention, operator_table, read_operators, seen_pairs, work


def work_of(**row: Any) -> dict[str, float]:
    return {name: float(values[0]) for name, values in work(operator_table([row])).items()}


@given(q=st.integers(1, 12), more=st.integers(0, 12), window=st.integers(0, 15), causal=st.booleans())
def test_seen_pairs_are_those_that_a_mask_leaves(q: int, more: int, window: int, causal: bool) -> None:
    query, key = np.ogrid[more : more + q, 0 : more + q]
    mask = np.ones((q, q + more), dtype=bool)
    if causal:
        mask = (key <= query) & ((key > query - window) | (window == 0))
    assert seen_pairs(np.array([float(q)]), np.array([float(q + more)]), causal, window)[0] == mask.sum()


def test_work_of_products_and_attention() -> None:
    found = work_of(op="gemm", dtype="bf16", m=128, n=256, k=512)
    assert found["matrix"] == 2 * 128 * 256 * 512
    assert (found["read"], found["written"]) == (2 * (128 * 512 + 512 * 256), 2 * 128 * 256)
    # weights alone are narrow; what is added up leaves in 16 bits
    assert work_of(op="gemm", dtype="int4_wo", m=1, n=256, k=512)["read"] == 2 * 512 + 512 * 256 / 2
    assert work_of(op="gemm", dtype="fp8", m=1, n=256, k=512)["written"] == 2 * 256
    # 2 rows dealt to 4 weights use 1.75 of them on average
    experts = work_of(op="grouped_gemm", dtype="bf16", batch=4, m=2, n=32, k=8)
    assert experts["matrix"] == 2 * 2 * 32 * 8
    assert experts["read"] == pytest.approx(2 * (2 * 8 + 1.75 * 32 * 8))
    decode = attention(32, 8, 128, [1, 1], [1000, 3000])
    step = work_of(op="attention", dtype="bf16", kv_dtype="fp8", **decode)
    assert step["matrix"] == 4 * 32 * 128 * 4000
    assert step["read"] == 2 * 32 * 128 * 2 + 2 * 8 * 128 * 4000  # keys and values of a byte
    assert attention(32, 8, 128, [1], [4096], window=1024)["kv_tokens"] == 1024


def test_work_of_convolutions_is_that_of_their_direction() -> None:
    sizes = {"batch": 2, "in_channels": 4, "out_channels": 8, "height": 6, "width": 6, "kernel_h": 3, "kernel_w": 3,
             "out_h": 4, "out_w": 4}  # fmt: skip
    forward, by_input, by_weights = (work_of(op="conv", dtype="float32", backward=b, **sizes) for b in range(3))
    assert forward["matrix"] == by_input["matrix"] == 2 * 2 * 8 * 4 * 4 * 4 * 9
    image, weights, result = 4 * 2 * 4 * 36, 4 * 4 * 8 * 9, 4 * 2 * 8 * 16
    assert (forward["read"], forward["written"]) == (image + weights, result)
    assert (by_input["read"], by_input["written"]) == (result + weights, image)
    assert (by_weights["read"], by_weights["written"]) == (image + result, weights)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"op": "gemm", "m": 4, "n": 4}, "row 2: gemm needs k"),
        ({"op": "gemm", "m": -4, "n": 4, "k": 1}, "row 2: m is -4"),
        ({"op": "gemm", "m": "many", "n": 4, "k": 1}, "row 2: m is many"),
        ({"op": "gemm", "m": 0.5, "n": 4, "k": 1}, "row 2: m is 0.5, expected a whole number"),
        ({"op": "gemm", "m": 1, "n": 4, "k": 1, "dtype": "bf17"}, "row 2, dtype: unknown data type 'bf17'"),
        ({"op": "7"}, "row 2: op is '7', expected the name"), ({"op": ""}, "row 2: op is '', expected the name"),
        ({"op": "attention", "heads": 4, "kv_heads": 4, "head_dim": 8, "q_lengths": "1.5"}, "row 2: q_lengths is 1.5"),
        ({"op": "attention", "heads": 4, "kv_heads": 3, "head_dim": 8, "q_lengths": "1", "kv_lengths": "9"}, "multiple of 3"),
        ({"op": "attention", "heads": 4, "kv_heads": 4, "head_dim": 8, "q_lengths": "5", "kv_lengths": "4"}, "4 keys for 5"),
        ({"op": "attention", "heads": 4, "kv_heads": 4, "head_dim": 8, "q_lengths": "5"}, "needs kv_lengths"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "step.csv"
    pd.DataFrame([{"op": "rmsnorm", "m": 1, "n": 8}, row]).to_csv(path, index=False)
    with pytest.raises(ProgramError, match=message):
        read_operators(path, "bfloat16")
    for rows, said in ("", "lists no operator"), ("gemm,8,64,32,\n,,,,5\n", "row 2 has more fields than the 4"):
        path.write_text(f"op,m,n,k\n{rows}")
        with pytest.raises(ProgramError, match=said):
            read_operators(path, "bfloat16")


def test_lists_of_operators_keep_what_is_unknown(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"op": "attention", "heads": 4, "kv_heads": 4, "head_dim": 8, "q_lengths": [2, 1], "kv_lengths": [5, 9], "count": 3},
        {"op": "mystery", "phase": "decode"}, {"op": "gemm", "m": 8, "n": 8, "k": 8},
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(tmp_path / "step.parquet")
    found = read_operators(tmp_path / "step.parquet", "fp8")
    assert found["known"].tolist() == [True, False, True]
    assert found["dtype"].tolist() == ["bfloat16", "bfloat16", "fp8"], "only products are narrow"
    assert found.loc[0, ["tokens", "kv_tokens", "pairs", "count"]].tolist() == [3, 14, 4 + 5 + 9, 3]


def test_files_may_have_blanks_brackets_and_commas_at_the_end_of_rows(tmp_path: Path) -> None:
    path, header = tmp_path / "step.csv", "op, m,n,k,heads, kv_heads,head_dim,q_lengths,kv_lengths\n"
    path.write_text(header + ' gemm,8,64,32,,,,,,\nattention,,,,4,4,8,"[2, 1]",[5 9],\nattention,,,,4,4,8,2 1,"5,9"\n')
    path.write_text(path.read_text() + 'attention,,,,4,4,8,2;1,"(5, 9)"\n')
    found = read_operators(path, "bfloat16")[["m", "k", "tokens", "kv_tokens"]]
    assert found.fillna(0).to_numpy().tolist() == [[8, 32, 0, 0], [0, 0, 3, 14], [0, 0, 3, 14], [0, 0, 3, 14]]
    path.write_text("op,bytes,dtype\nelementwise,4096,fp32\nelementwise,4096,\n")
    assert read_operators(path, "bfloat16")["n"].tolist() == [1024, 2048]


@pytest.mark.parametrize(("name", "billions"), [
    ("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.55), ("mixtral-8x7b", 46.7), ("qwen3-30b-a3b", 30.5), ("gemma-3-27b", 27.0),
    ("gpt-oss-20b", 20.9), ("gpt-oss-120b", 116.8), ("deepseek-v3", 671.0),
])  # fmt: skip
def test_decoders_have_the_parameters_that_are_published(name: str, billions: float) -> None:
    assert load_decoder(name).weights() / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize(("kind", "sizes", "more", "billions"), [
    ("olmoe", (2048, 1024, 16, 16, 16, 50304), {"num_experts": 64, "num_experts_per_tok": 8}, 6.92),
    ("phimoe", (4096, 6400, 32, 32, 8, 32064), {"num_local_experts": 16, "num_experts_per_tok": 2}, 41.9),
    ("glm", (4096, 13696, 40, 32, 2, 151552), {}, 9.4), ("cohere", (8192, 22528, 40, 64, 64, 256000), {}, 35.0),
    ("smollm3", (2048, 11008, 36, 16, 4, 128256), {}, 3.075),
])  # fmt: skip
def test_other_kinds(kind: str, sizes: tuple[int, ...], more: dict[str, Any], billions: float, tmp_path: Path) -> None:
    config = dict(zip(MODELS["llama-3.1-8b"], (kind, *sizes), strict=True)) | more
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_decoder(tmp_path / "config.json").weights() / 1e9 == pytest.approx(billions, rel=0.002)


def test_latent_attention_keeps_one_vector_a_token() -> None:
    decoder = load_decoder("deepseek-v3")
    kept = [decoder.memory_bytes("fp8", "bfloat16", 1, tokens, 0)["KV cache"] for tokens in (0, 1000)]
    assert kept[1] - kept[0] == 70_272_000  # DeepSeek-V3's technical reports
    for new, past, read in ((1, 1000, 1001 * 576 + 128 * 288), (512, 0, 512 * 128 * (320 + 160))):
        table = operator_table(decoder.step(1, new, past, "fp8", "bfloat16"))
        done, attends = work(table), (table["op"] == "attention").to_numpy()
        assert done["read"][attends] == 2 * read
        assert done["matrix"][attends] == table["pairs"].to_numpy()[attends] * 256 * (576 if new == 1 else 192 + 128)
        active = sum(done["matrix"][~attends] * table["count"][~attends]) / new / 2
        assert active == pytest.approx(37e9 - 7168 * 129280, rel=0.02)  # the embedding is looked up


def test_a_step_does_two_operations_a_parameter_and_token() -> None:
    decoder = load_decoder("llama-3.1-8b")
    assert {row["dtype"] for row in decoder.step(1, 1, 9, "float16", "bfloat16")} == {"float16"}
    held = [decoder.memory_bytes(dtype, "fp8", 1, 1, 1)["weights"] for dtype in ("bfloat16", "fp8", "int4_wo")]
    assert held == pytest.approx([16.06e9, 9.08e9, 5.59e9], rel=1e-3)  # embedding and vocabulary keep 16 bits
    for tp in (1, 2):
        table = operator_table(decoder.step(1, 1, 0, "bfloat16", "bfloat16", tp))
        products = work(table)["matrix"] * table["count"] * (table["op"] == "gemm")
        embedding = 4096 * 128256  # is looked up, not multiplied
        assert products.sum() == pytest.approx(2 * (decoder.weights() - embedding) / tp, rel=1e-3)
        assert ("all_reduce" in set(table["op"])) == (tp > 1)


def test_configurations_that_are_not_known_say_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()

    def written(**config: Any) -> Path:
        path.write_text(json.dumps(config))
        return path

    known = load_decoder(written(**MODELS["llama-3.1-8b"]))
    assert (known.name, known.layers) == ("tiny", 32) and is_config(path)
    with pytest.raises(NetworkError, match="lacks num_hidden_layers, intermediate_size"):
        load_decoder(written(model_type="llama", hidden_size=64, num_attention_heads=4, vocab_size=100))
    llama, experts = MODELS["llama-3.1-8b"], MODELS["mixtral-8x7b"]
    for config, said in (
        ({"model_type": "mamba"}, "no decoder of kind 'mamba'"),
        ({**llama, "model_type": "qwen3_next"}, "no decoder of kind 'qwen3_next'"),
        ({**llama, "layer_types": ["full_attention", "linear_attention"]}, "layers that differ .* layer_types"),
        ({**MODELS["deepseek-v3"], "v_head_dim": None}, "lacks v_head_dim"),
        ({**llama, "hidden_size": "4096"}, "hidden_size is '4096', expected a whole number"),
        ({**llama, "num_attention_heads": 0}, "num_attention_heads is 0"),
        ({**llama, "num_key_value_heads": 7}, "32 attention heads are not a multiple of 7"),
        ({**experts, "num_experts_per_tok": None}, "lacks num_experts_per_tok"),
        ({**experts, "num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected at most its 8 experts"),
        ({**experts, "num_local_experts": -8}, "num_local_experts is -8, expected a whole number from 0"),
        ({**experts, "first_k_dense_replace": 99}, "first_k_dense_replace is 99, expected at most its 32 layers"),
        ({**MODELS["qwen3-30b-a3b"], "decoder_sparse_step": 2}, "layers that differ .* decoder_sparse_step"),
        ({**llama, "quantization_config": "fp8"}, "a size of its configuration cannot be"),
        ({**llama, "text_config": None}, "text_config is None, expected names and values"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', expected a list"),
        ({**llama, "model_type": None}, "lacks model_type"),
    ):
        with pytest.raises(NetworkError, match=f"tiny: .*{said}"):
            load_decoder(written(**config))
    assert load_decoder("meta-llama/Llama-3.1-8B-Instruct") == load_decoder("llama-3.1-8b")
    window = {**llama, "sliding_window": 64}
    half, every = ["sliding_attention", "full_attention"] * 20, "sliding_window_pattern"
    kinds = {"layer_types": half, every: "LG"}, {every: 6}, {}, {"use_sliding_window": False}, {"max_window_layers": 28}
    assert [load_decoder(written(**window, **kind)).windowed for kind in kinds] == [16, 27, 32, 0, 4]
    text = {name: size for name, size in MODELS["gemma-3-27b"].items() if name != "vocab_size"}
    gemma = load_decoder(written(model_type="gemma3", text_config=text))
    assert gemma.text_part and not known.text_part and gemma.vocabulary == 262208
    rows = load_decoder("gpt-oss-20b").step(2, 1, 4000, "bfloat16", "bfloat16")
    assert [(row["count"], row["pairs"]) for row in rows if row["op"] == "attention"] == [(12, 8002), (12, 256)]
    kept = [load_decoder("gpt-oss-20b").memory_bytes("fp8", "bfloat16", 2, n, 0)["KV cache"] for n in (128, 4096)]
    assert kept[1] - kept[0] == 2 * 12 * (4096 - 128) * 2 * 8 * 64 * 2  # of every second layer
    with pytest.raises(NetworkError, match=r"32 heads, 8 heads of keys and 14336 columns cannot be split over 3 .* 2, 4, 8"):
        known.step(1, 1, 0, "bfloat16", "bfloat16", 3)
    assert not is_config(tmp_path / "absent.json")
