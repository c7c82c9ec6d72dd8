"""Options of a config.json: keys with their defaults; an unsupported value is an error with its
key."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.checks import shown, unfit
from ..core.errors import TesseraError, UsageError
from ..core.value_checks import is_whole
from ..nn.positions import SCALINGS, Rope

KINDS = ("full_attention", "sliding_attention")
# Keys about the making, training, storage or sampling of a model, not its computation.
HARMLESS = re.compile(
    r"^(_.*|architectures|model_type|(torch_)?dtype|transformers_version|auto_map|.*_token_ids?"
    r"|.*dropout|.*_pdrop|dropout_.*|initializer_.*|use_cache|cache_implementation|output_.*"
    r"|return_dict.*|summary_.*|task_specific_params|problem_type|id2label|label2id|num_labels"
    r"|name_or_path|pretraining_tp|torchscript|tokenizer_class|gradient_checkpointing|n_ctx"
    r"|router_(aux_loss_coef|jitter_noise)|chunk_size_feed_forward|attn_implementation"
    r"|reorder_and_upcast_attn|is_decoder|max_window_layers|unsloth.*"
    r"|max_length|min_length|do_sample|temperature|top_[kp]|num_beams.*|.*_penalty)$"
)


class Options:
    """The keys of a config.json; null counts as absent. Raises UsageError for a value that does not
    fit."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw, self.asked = raw, set[str]()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number; without a default the key is required."""
        value = self.get(key, default)
        if value is None:
            raise UsageError(
                f"load_hf: config.json lacks {key!r}",
                fix="save the model's configuration anew with transformers",
            )
        if not is_whole(value) or value < 1:
            raise _wrong(key, value, "a whole number of at least 1")
        return int(value)

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _wrong(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise _wrong(key, value, "true or false")
        return value

    def choice(self, key: str, default: str, translations: Mapping[str, str]) -> str:
        """Our word for the value of `key`."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in translations:
            raise unsupported(key, value, translations)
        return translations[value]

    def only(self, key: str, value: Any, default: Any = None) -> None:
        """Requires the only supported value of `key`, which is by default also its default."""
        if self.get(key, value if default is None else default) != value:
            raise unsupported(key, self.get(key), [value])

    def windows(self, types: Sequence[str], window: int | None) -> tuple[int, ...]:
        """The window of each layer by `layer_types`, or by the family's `types`."""
        found = self.get("layer_types", types)
        for kind in found:
            if kind not in KINDS:
                raise unsupported("layer_types", kind, KINDS)
        if window is None or KINDS[1] not in found:
            return ()
        return tuple(window if kind == KINDS[1] else 0 for kind in found)

    def rope(self, partial: float | None = None, base: float = 10000.0, kind: str = "") -> Rope:
        """The rates of rotary embeddings, in either form: rope_parameters, or rope_scaling.

        `partial` and `base` are those of a family; without `partial` it rotates whole heads. `kind`
        selects a kind of layers if each has its own rates.
        """
        old = self.get("rope_scaling")
        parameters = self.get("rope_parameters") or old or {}
        if isinstance(parameters, dict) and kind in parameters:
            parameters = parameters[kind] or {}
        if not isinstance(parameters, dict) or any(
            isinstance(v, dict) for v in parameters.values()
        ):
            raise unsupported("rope_parameters", parameters, ["one set for all layers"])
        outer = {k: self.get(k) for k in ("rope_theta", "partial_rotary_factor")}
        inner = Options({**{k: v for k, v in outer.items() if v is not None}, **parameters})
        kind = inner.get("rope_type", inner.get("type", "default"))
        kind = "longrope" if kind == "su" else kind
        if kind not in SCALINGS:
            raise unsupported("rope_type", kind, SCALINGS)
        part = inner.number("partial_rotary_factor", partial or 1.0)
        if partial is None and part != 1.0:
            # The file and transformers disagree, and it is not clear which is meant.
            raise UsageError(
                f"load_hf: config.json: 'partial_rotary_factor' is {shown(part)}, which "
                f"transformers ignores in a {self.get('model_type')}",
                fix="remove the key if the model turns whole heads; phi, phi3 and gpt_neox have it",
            )
        most = self.size("max_position_embeddings", 8192)
        original = inner.get("original_max_position_embeddings")
        original = (
            self.get("original_max_position_embeddings", most) if original is None else original
        )
        said: dict[str, Any] = {
            "base": inner.number("rope_theta", base),
            "partial": part,
            "scaling": kind,
        }
        stretch = most / original if kind in ("yarn", "longrope") else 1.0
        factor = inner.number("factor", stretch)
        attention = inner.get("attention_factor")
        if kind != "default":
            said["factor"] = factor
        if kind == "llama3":
            said |= {"low": inner.number("low_freq_factor", 1.0)}
            said |= {"high": inner.number("high_freq_factor", 4.0)}
        if kind == "dynamic":
            original = most
        if kind in ("llama3", "dynamic", "yarn", "longrope"):
            said["original"] = original
        if kind == "yarn":
            said |= {"low": inner.number("beta_slow", 1.0), "high": inner.number("beta_fast", 32.0)}
            said["truncate"] = inner.flag("truncate", True)
            scales = [inner.number(k, 0.0) for k in ("mscale", "mscale_all_dim")]
            if attention is None and all(scales) and factor > 1:
                by = [0.1 * m * math.log(factor) + 1.0 for m in scales]
                attention = by[0] / by[1]
        if kind == "longrope":
            said |= {k: tuple(inner.get(f"{k}_factor", ())) for k in ("short", "long")}
        if kind in ("yarn", "longrope") and attention is not None:
            said["attention"] = attention
        inner.finish("rope_parameters: ", ("rope_type", "type", "original_max_position_embeddings"))
        return Rope(**said)

    def finish(self, where: str = "", also: Sequence[str] = ()) -> None:
        """Raises UsageError if a key with a value was not read, except harmless keys and `also`."""
        for key, value in self.raw.items():
            if value and key not in self.asked and key not in also and not HARMLESS.search(key):
                raise UsageError(
                    f"load_hf: config.json: {where}{key!r} is {shown(value)}, which is not known",
                    fix="load a model without it; if it changes nothing, remove it from the file",
                )


def rope_options(rope: Rope) -> dict[str, Any]:
    """`rope` as rope_parameters."""
    out: dict[str, Any] = {"rope_theta": rope.base, "rope_type": rope.scaling}
    if rope.partial != 1.0:
        out["partial_rotary_factor"] = rope.partial
    if rope.scaling != "default":
        out["factor"] = rope.factor
    if rope.scaling in ("llama3", "yarn", "longrope"):
        out["original_max_position_embeddings"] = rope.original
    if rope.scaling == "llama3":
        out |= {"low_freq_factor": rope.low, "high_freq_factor": rope.high}
    if rope.scaling == "yarn":
        out |= {"beta_slow": rope.low, "beta_fast": rope.high, "truncate": rope.truncate}
    if rope.scaling == "longrope":
        out |= {"short_factor": list(rope.short), "long_factor": list(rope.long)}
    if rope.attention is not None and rope.scaling in ("yarn", "longrope"):
        out["attention_factor"] = rope.attention
    return out


def unsupported(key: str, value: object, supported: Any) -> UsageError:
    return UsageError(
        f"load_hf: config.json: {key!r} is {shown(value)}, which is not supported",
        fix="load a model with " + " or ".join(map(str, supported)),
    )


def _wrong(key: str, value: object, wanted: str) -> TesseraError:
    return unfit("load_hf", f"config.json: {key!r}", value, f"give {wanted}")
