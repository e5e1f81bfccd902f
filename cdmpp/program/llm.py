"""Decoder-only transformers as lists of operators, from the configuration file that is published with their weights.

Dense, grouped-query, latent-attention and mixture-of-experts decoders with gated feed-forward layers (Llama, Qwen, Gemma,
gpt-oss, DeepSeek and similar). A serving step runs each layer as engines do: one product for queries, keys and values, one
for gate and up, experts as grouped products, and with ``tp`` ranks two all-reduces a layer (Shoeybi et al., Megatron-LM).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdmpp.errors import NetworkError, raised_as
from cdmpp.files import read_json
from cdmpp.program.operators import ELEMENT_BYTES, attention

_SIZES = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "vocab_size")  # fmt: skip
#: Published configurations of common open models: these sizes, and further fields.
MODELS: dict[str, dict[str, Any]] = {
    name: {**dict(zip(_SIZES, sizes, strict=True)), **more}
    for name, sizes, more in (
        ("llama-3.1-8b", ("llama", 4096, 14336, 32, 32, 8, 128256), dict[str, Any]()),
        ("llama-3.1-70b", ("llama", 8192, 28672, 80, 64, 8, 128256), {}),
        ("mistral-7b", ("mistral", 4096, 14336, 32, 32, 8, 32768), {}),
        ("qwen2.5-7b", ("qwen2", 3584, 18944, 28, 28, 4, 152064), {}),
        ("qwen3-8b", ("qwen3", 4096, 12288, 36, 32, 8, 151936), {"head_dim": 128}),
        ("qwen3-32b", ("qwen3", 5120, 25600, 64, 64, 8, 151936), {"head_dim": 128}),
        ("qwen3-30b-a3b", ("qwen3_moe", 2048, 6144, 48, 32, 4, 151936),
         {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}),
        ("gemma-3-27b", ("gemma3_text", 5376, 21504, 62, 32, 16, 262208),
         {"head_dim": 128, "sliding_window": 1024, "tie_word_embeddings": True}),
        *((f"gpt-oss-{size}b", ("gpt_oss", 2880, 2880, layers, 64, 8, 201088),
           {"head_dim": 64, "sliding_window": 128, "num_local_experts": experts, "num_experts_per_tok": 4,
            "quantization_config": {"quant_method": "mxfp4"}})
          for size, layers, experts in ((20, 24, 32), (120, 36, 128))),
        *((name, ("deepseek_v3", 7168, 18432, 61, 128, 128, 129280),
           {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3, "quantization_config": {"quant_method": "fp8"}})
          for name in ("deepseek-v3", "deepseek-r1")),
        ("mixtral-8x7b", ("mixtral", 4096, 14336, 32, 32, 8, 32000), {"num_local_experts": 8, "num_experts_per_tok": 2}),
    )
}  # fmt: skip
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
#: Kinds of model as described above; those of which only each n-th layer sees all tokens; fields of layers that differ more.
_KNOWN = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "phi3", "gemma", "granite", "olmo2",
          "internlm2", "deepseek", "yi", "baichuan", "gemma2", "gemma3", "gemma3_text", "gpt_oss", "glm4_moe", "olmo3",
          "smollm3", "mistral3", "ministral", "exaone4", "seed_oss", "ernie4_5", "dots1", "deepseek_v2", "deepseek_v3",
          "kimi_k2", "cohere", "cohere2", "glm", "glm4", "granitemoe", "olmoe", "phimoe", "minimax_m2", "stablelm",
          "qwen2_vl", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text")  # fmt: skip
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3text": 6, "gptoss": 2, "olmo3": 4, "cohere2": 4}
#: Sizes that published configurations of Gemma 3 leave out, as they are the defaults of its class.
_GEMMA_3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}
_UNLIKE = ("full_attention_interval", "interleave_moe_layer_step", "mlp_only_layers")
#: Sizes of a configuration that may be 0.
_ALSO_0 = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size", "n_shared_experts",
           "shared_expert_intermediate_size", "first_k_dense_replace", "max_window_layers")  # fmt: skip
#: Products that stay in 16 bits, as everything does except the layers' other products.
_IN_16_BITS = ("vocabulary", "router", "queries to latents", "latents to values")
#: Sizes of latent attention: what queries, and keys with values, are reduced to; parts of a head.
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder. A layer, or each of its ``experts``, is ``intermediate`` wide; ``dense`` layers have no experts and
    are ``dense_intermediate`` wide; ``windowed`` layers see a window. ``latent`` are the sizes :data:`_LATENT` of heads that
    expand their keys and values from one vector a token (DeepSeek-V2, arXiv 2405.04434, section 2.1). ``text_part`` says that
    the model also reads images or sound, by parts that are not included; ``published`` how its weights are quantised, if so."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    shared_intermediate: int = 0
    window: int = 0
    windowed: int = 0
    dense: int = 0
    dense_intermediate: int = 0
    latent: tuple[int, ...] = ()
    tied: bool = False
    text_part: bool = False
    published: str = ""

    def splits(self, tp: int) -> bool:
        """Whether every rank gets whole heads and equal parts."""
        return tp > 0 and not (self.heads % tp or (self.kv_heads % tp and tp % self.kv_heads) or self.intermediate % tp)

    def weights_in_16_bits(self) -> float:
        """Parameters of the embedding and of :data:`_IN_16_BITS`."""
        _, kv, nope, _, value = self.latent or (0,) * len(_LATENT)
        routers = (self.layers - self.dense) * self.experts
        outside = self.hidden * (self.vocabulary * (1 if self.tied else 2) + routers)
        return outside + self.layers * self.heads * kv * (nope + value)

    def weights(self) -> float:
        """All parameters."""
        attending = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if self.latent:
            q, kv, nope, rope, value = self.latent
            of_head = (q or self.hidden) * (nope + rope) + self.hidden * value
            attending = self.hidden * (q + kv + rope) + self.heads * of_head
        columns = self.intermediate * max(1, self.experts) + self.shared_intermediate
        wide = 3 * self.hidden * ((self.layers - self.dense) * columns + self.dense * self.dense_intermediate)
        return self.layers * attending + wide + self.weights_in_16_bits()

    def memory_bytes(self, dtype: str, kv_dtype: str, batch: int, tokens: int, new: int, tp: int = 1) -> dict[str, float]:
        """Bytes on one of ``tp`` ranks: weights, keys and values of ``tokens`` of each sequence, and activations of ``new``."""
        in_16_bits = self.weights_in_16_bits()
        weights = (self.weights() - in_16_bits) * ELEMENT_BYTES[dtype] + in_16_bits * 2
        kept = (self.layers - self.windowed) * tokens + self.windowed * min(tokens, self.window)
        _, latent, _, rope, _ = self.latent or (0,) * len(_LATENT)
        of_token = latent + rope if latent else 2 * max(1.0, self.kv_heads / tp) * self.head_dim
        cache = batch * kept * of_token * ELEMENT_BYTES[kv_dtype]
        live = new * (4 * self.hidden + 3 * self.intermediate / tp) * 2
        return {"weights": weights / tp, "KV cache": cache, "activations": live}

    def step(self, batch: int, new: int, past: int, dtype: str, kv_dtype: str, tp: int = 1) -> list[dict[str, Any]]:
        """Operators of one step on one of ``tp`` ranks, for ``batch`` sequences of ``new`` tokens each after ``past`` earlier
        ones, as rows for :func:`cdmpp.program.operators.operator_table` with ``name`` and ``count``. Raises NetworkError unless
        every rank gets whole heads and equal parts of the layers."""
        if not self.splits(tp):
            parts = f"{self.heads} heads, {self.kv_heads} heads of keys and {self.intermediate} columns"
            ranks = ", ".join(str(n) for n in range(1, self.heads + 1) if self.splits(n))
            raise NetworkError(f"{self.name}: {parts} cannot be split over {tp} ranks evenly; they can be over {ranks}")
        tokens, heads, kv_heads = batch * new, self.heads // tp, max(1, self.kv_heads // tp)
        in_16_bits = dtype if dtype == "float16" else "bfloat16"
        kv_dtype = in_16_bits if ELEMENT_BYTES[kv_dtype] == 2 else kv_dtype  # no conversion between two of 16 bits
        rows: list[dict[str, Any]] = []

        def add(name: str, op: str, count: float = self.layers, **sizes: Any) -> None:
            rows.append({"name": name, "op": op, "count": count, "dtype": dtype, **sizes})

        add("embedding", "embedding", 1, m=tokens, n=self.hidden)
        add("norms", "rmsnorm", 2 * self.layers + 1, m=tokens, n=self.hidden)
        head_dim = of_output = self.head_dim
        if self.latent:
            q, kv, nope, rope, of_output = self.latent
            add("latents", "gemm", m=tokens, n=q + kv + rope, k=self.hidden)
            add("queries", "gemm", m=tokens, n=heads * (nope + rope), k=q or self.hidden)
            add("rope", "elementwise", m=tokens, n=(heads + 1) * rope, inputs=1)
            if new > 1:
                add("keys and values", "gemm", m=batch * (past + new), n=heads * (nope + of_output), k=kv)
                kv_heads, head_dim = heads, (nope + rope + of_output) // 2
            else:  # all heads read the vectors themselves, once: what would expand them is applied to queries and output
                add("queries to latents", "gemm", batch=heads, m=tokens, n=kv, k=nope)
                add("latents to values", "gemm", batch=heads, m=tokens, n=of_output, k=kv)
                kv_heads, head_dim = 1, (kv + rope) // 2
        else:
            add("qkv", "gemm", m=tokens, n=(heads + 2 * kv_heads) * head_dim, k=self.hidden)
            add("rope", "elementwise", m=tokens, n=(heads + kv_heads) * head_dim, inputs=1)
        lengths = [new] * batch, [past + new] * batch
        for window, layers in ((0, self.layers - self.windowed), (self.window, self.windowed)):
            name, sizes = "attention" + " to a window" * bool(window), (heads, kv_heads, head_dim, *lengths)
            if layers:
                add(name, "attention", layers, kv_dtype=kv_dtype, **attention(*sizes, window=window))
        add("attention output", "gemm", m=tokens, n=self.hidden, k=heads * of_output)
        sparse, wide = self.layers - self.dense, self.intermediate // tp
        if self.experts:
            add("router", "gemm", sparse, m=tokens, n=self.experts, k=self.hidden)
            dealt = {"batch": self.experts, "m": tokens * self.experts_per_token}
            add("experts, gate and up", "grouped_gemm", sparse, n=2 * wide, k=self.hidden, **dealt)
            add("experts, activation", "silu_mul", sparse, m=tokens * self.experts_per_token, n=wide)
            add("experts, down", "grouped_gemm", sparse, n=self.hidden, k=wide, **dealt)
            wide = self.shared_intermediate // tp
        for width, layers in ((wide, sparse), (self.dense_intermediate // tp, self.dense)):
            if width and layers:
                add("gate and up", "gemm", layers, m=tokens, n=2 * width, k=self.hidden)
                add("activation", "silu_mul", layers, m=tokens, n=width)
                add("down", "gemm", layers, m=tokens, n=self.hidden, k=width)
        if tp > 1:
            add("all-reduce", "all_reduce", 2 * self.layers, bytes=2 * tokens * self.hidden, num_workers=tp)
        # only the last token of each sequence needs logits
        add("vocabulary", "gemm", 1, m=batch, n=-(-self.vocabulary // tp), k=self.hidden)
        for row in rows:
            if row["name"] in _IN_16_BITS or row["op"] not in ("gemm", "grouped_gemm"):
                row["dtype"] = in_16_bits
        return rows


def model_name(spec: str | Path) -> str:
    """A model's name in the form of :data:`MODELS`: ``meta-llama/Llama-3.1-8B-Instruct`` -> ``llama-3.1-8b``."""
    return str(spec).lower().rpartition("/")[2].removesuffix("-instruct")


def load_decoder(spec: str | Path) -> Decoder:
    """Load a decoder by a name in :data:`MODELS` or the path of its ``config.json``. Raises NetworkError if the file cannot be
    read, is of another kind of model, or lacks a size, which it names."""
    name = model_name(spec)
    if name in MODELS:
        return _decoder(MODELS[name], name)
    with raised_as(NetworkError, f"cannot read {spec}"):
        config = read_json(spec)
    if not isinstance(config, dict):
        raise NetworkError(f"{spec} holds no configuration: expected names and values")
    name = Path(spec).parent.name or str(spec)
    if not isinstance(text := config.get("text_config", {}), dict):
        raise NetworkError(f"{name}: text_config is {text!r}, expected names and values")
    sentence = f"{name}: a size of its configuration cannot be"
    with raised_as(NetworkError, sentence, TypeError, LookupError, ArithmeticError):
        return _decoder({**config, **text}, name)


def is_config(path: str | Path) -> bool:
    """Whether a JSON file is the configuration of a transformer, rather than a network graph of this package."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and bool({"model_type", "architectures", "hidden_size"} & content.keys())


def _decoder(config: Mapping[str, Any], name: str) -> Decoder:
    architectures = config.get("architectures") or [""]
    if not isinstance(architectures, list):
        raise NetworkError(f"{name}: architectures is {architectures!r}, expected a list of names")
    kind = str(config.get("model_type") or architectures[0]).lower()
    if not kind:
        raise NetworkError(f"{name}: its configuration lacks model_type")
    short = kind.removesuffix("forcausallm").replace("_", "")
    if short not in {known.replace("_", "") for known in _KNOWN}:
        raise NetworkError(f"{name}: no decoder of kind {kind!r} is known here; there are {', '.join(_KNOWN)}")
    config = {**_GEMMA_3, **config} if short.startswith("gemma3") else config
    unlike = [field for field in _UNLIKE if config.get(field)]
    types = list(config.get("layer_types") or ())
    unlike += ["layer_types"] * (not {"full_attention", "sliding_attention"}.issuperset(types))
    unlike += ["decoder_sparse_step"] * (config.get("decoder_sparse_step") not in (None, 1))
    if unlike:
        raise NetworkError(f"{name}: layers that differ like this are not known here: {', '.join(unlike)}")
    pattern = ["sliding_window_pattern"] * (not types)
    for field in (*_SIZES[1:], "head_dim", "num_experts_per_tok", "sliding_window", *_LATENT, *pattern, *_ALSO_0):
        least = "from 0" if field in _ALSO_0 else "above 0"
        if (given := config.get(field)) is not None and (type(given) is not int or given < (field not in _ALSO_0)):
            raise NetworkError(f"{name}: {field} is {given!r}, expected a whole number {least}")
    missing = [field for field in _NEEDED if field not in config]
    experts = int(config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts") or 0)
    inner = int((experts and config.get("moe_intermediate_size")) or config.get("intermediate_size") or 0)
    missing += ["intermediate_size"] * (not inner)
    missing += ["num_experts_per_tok"] * (experts > 0 and not config.get("num_experts_per_tok"))
    latent = tuple(int(config.get(field) or 0) for field in _LATENT) if config.get("kv_lora_rank") else ()
    missing += [field for field, size in zip(_LATENT[1:], latent[1:], strict=False) if not size]
    if missing:
        raise NetworkError(f"{name}: its configuration lacks {', '.join(missing)}")
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise NetworkError(f"{name}: {heads} attention heads are not a multiple of {kv_heads} heads of keys")
    shared = config.get("shared_expert_intermediate_size") or int(config.get("n_shared_experts") or 0) * inner
    layers = int(config["num_hidden_layers"])
    for field, most, what in (("first_k_dense_replace", layers, "layers"), ("num_experts_per_tok", experts, "experts")):
        if experts and int(config.get(field) or 0) > most:
            raise NetworkError(f"{name}: {field} is {config[field]}, expected at most its {most} {what}")
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0
    every = config.get("sliding_window_pattern") or _PATTERNS.get(short, layers + 1)
    first = min(layers, int(config.get("max_window_layers") or 0))  # Qwen's first layers see all tokens
    windowed = types[:layers].count("sliding_attention") if types else layers - (layers // every or first)
    return Decoder(
        name=name, hidden=int(config["hidden_size"]), layers=layers, heads=heads, kv_heads=kv_heads,
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads), intermediate=inner,
        vocabulary=int(config["vocab_size"]), experts=experts, experts_per_token=int(config.get("num_experts_per_tok") or 0),
        shared_intermediate=int(shared or 0) if experts else 0, window=window, windowed=windowed if window else 0,
        dense=int(config.get("first_k_dense_replace") or 0) if experts else 0,
        dense_intermediate=int(config.get("intermediate_size") or 0), latent=latent,
        tied=bool(config.get("tie_word_embeddings", short.startswith(("gemma", "cohere", "smollm3", "ernie")))),
        text_part=bool({"text_config", "vision_config"} & config.keys()),
        published=str(dict(config.get("quantization_config") or {}).get("quant_method", "")),
    )  # fmt: skip
