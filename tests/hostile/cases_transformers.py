"""Model folders of families that only transformers computes: settings that fill memory or time, code, kernels of the
hub, files of torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from cases_models import AUTO_MAP, CHAT, MODULE, PICKLE, safetensors
from harness import TRAIN, Folder, HostileCase

GEMMA: dict[str, Any] = {
    **{
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "vocab_size": 6400,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
    },
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64},
}
GPT: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 6400,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 64,
}
EXPERTS: dict[str, Any] = GEMMA | {
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
INIT = f"{' '.join(each for each in TRAIN.split() if not each.startswith('model.'))} init_from=model"
INDEX = "model__safetensors__index__json"


def foreign(
    base: dict[str, Any], replaced: dict[str, bytes | str | None] | None = None, **fields: Any
) -> Callable[[Folder], None]:
    """A folder with this config.json and the weights of another model; `replaced` files have __ in place of a point,
    None removes one.
    """

    def build(folder: Folder) -> None:
        folder.copy("rows.jsonl")
        model = folder.copy("model")
        (model / "config.json").write_text(json.dumps(base | fields))
        for name in ("modeling.py", "configuration.py", "kernel.py"):
            folder.write(f"model/{name}", MODULE)
        for name, content in (replaced or {}).items():
            (model / name.replace("__", ".")).unlink(missing_ok=True)
            if content is not None:
                folder.write(f"model/{name.replace('__', '.')}", content)

    return build


def linked_shard(folder: Folder) -> None:
    index = json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}})
    foreign(GEMMA, {"model__safetensors": None, INDEX: index})(folder)
    os.symlink(folder.outside / "victim", folder.work / "model" / "model-00001-of-00001.safetensors")


def case(name: str, build: Callable[[Folder], None], message: str, *commands: str) -> HostileCase:
    return HostileCase(name, "models of transformers", build, commands or (INIT, CHAT), message)


CASES = [
    case("weights of another model", foreign(GEMMA), "do not fit"),
    case("code of the folder in auto_map", foreign(GEMMA, auto_map=AUTO_MAP, trust_remote_code=True), "do not fit"),
    case("code of the folder for an unknown model", foreign(GEMMA, auto_map=AUTO_MAP, model_type="evil"), "never executed"),
    case("kernel of the hub", foreign(GEMMA, _attn_implementation="evil/kernel", attn_implementation="evil/kernel"), "do not fit"),
    case("kernel of the hub in a nested config", foreign(GEMMA, text_config={"_attn_implementation": "evil/kernel"}), ""),
    case("experts implementation", foreign(EXPERTS, _experts_implementation="evil/kernel"), "do not fit"),
    case("quantization by code", foreign(GEMMA, quantization_config={"quant_method": "evil", "modules_to_not_convert": ["a"]}), "quantized"),
    case("class that is no causal language model", foreign(GEMMA, model_type="t5", architectures=["T5ForConditionalGeneration"]), "no causal language model"),
    case("model that is not causal", foreign({"model_type": "bert", "vocab_size": 6400, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}), ""),
    case("architectures of odd values", foreign(GEMMA, architectures=[1, {"a": []}, None, "../../evil"]), "do not fit"),
    case("architectures that is a text", foreign(GEMMA, architectures="../evil"), "do not fit"),
    case("huge hidden size", foreign(GEMMA, hidden_size=10**15), "hidden_size"),
    case("hidden size beyond the memory", foreign(GEMMA, hidden_size=10**9), ""),
    case("huge vocabulary", foreign(GEMMA, vocab_size=10**11), ""),
    case("huge number of layers", foreign(GEMMA, num_hidden_layers=10**7), "num_hidden_layers must be at most"),
    case("huge number of layers under another name", foreign(GPT, n_layer=10**7), "n_layer must be at most"),
    case("huge number of experts", foreign(EXPERTS, num_experts=10**8), "num_experts must be at most"),
    case("huge number of heads", foreign(GEMMA, num_attention_heads=10**9), "num_attention_heads must be at most"),
    case("huge table of positions", foreign(GPT, n_positions=10**6), ""),
    case("huge number of labels", foreign(GEMMA, num_labels=10**9), "do not fit"),
    case("labels that are no numbers", foreign(GEMMA, id2label={"a": 1}, label2id=[1]), "do not fit"),
    case("negative size", foreign(GEMMA, intermediate_size=-5), ""),
    case("size of zero", foreign(GEMMA, num_attention_heads=0), ""),
    case("text in place of a size", foreign(GEMMA, hidden_size="__import__('os')"), ""),
    case("list in place of a size", foreign(GEMMA, num_hidden_layers=[1]), ""),
    case("function of a path", foreign(GEMMA, hidden_activation="../../evil"), ""),
    case("unknown rope", foreign(GEMMA, rope_parameters={"rope_type": {"a": [1]}}), ""),
    case("rope of another type", foreign(GEMMA, rope_parameters={"rope_type": "evil", "rope_theta": 1e4}), ""),
    case("numbers that are none", foreign(GEMMA, rms_norm_eps={"__float__": "evil"}), ""),
    case("deep config", foreign(GEMMA, {"config__json": '{"model_type": "gemma2", "text_config": ' + '{"a": ' * 5000 + "1" + "}" * 5001}), "nested"),
    case("control characters in the type", foreign(GEMMA, model_type="\x1b[2J\x07"), "no model_type"),
    case("control characters in a field", foreign(GEMMA, hidden_activation="\x1b[2J\x07"), ""),
    case("weights as a pickle", foreign(GEMMA, {"model__safetensors": None, "pytorch_model__bin": PICKLE}), "not a file of weights"),
    case("shard as a pickle", foreign(GEMMA, {"model__safetensors": None, "pytorch_model__bin__index__json": '{"weight_map": {"a": "a.bin"}}', "a__bin": PICKLE}), "not a file of weights"),
    case("index to a file outside", foreign(GEMMA, {"model__safetensors": None, INDEX: '{"weight_map": {"a": "../../outside/victim"}}'}), "weight_map"),
    case("index that is a list", foreign(GEMMA, {"model__safetensors": None, INDEX: "[1]"}), "JSON object"),
    case("shard that is a link", linked_shard, "this is a link"),
    case("weights with other names", foreign(GEMMA, {"model__safetensors": safetensors({"\x1b[2J": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"1234")}), ""),
]  # fmt: skip
