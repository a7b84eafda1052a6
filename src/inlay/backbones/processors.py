"""The tokenizer or image processor that belongs to a backbone, with its gaps filled so that training can rely on it.

Text: a pad token that the model's config agrees on, a length the positions allow, no token outside the embeddings.
Images: PIL processors on every machine (torchvision's results differ a little), built from the config where the
checkpoint has none.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from inlay.backbones.locate import IMAGE_PROCESSOR, Location, heads
from inlay.backbones.towers import ImageTextProcessor
from inlay.errors import InlayError, first_line

UNLIMITED = 10**9
_DEFAULT_SIDE = 224
_TOKENIZER = re.compile(r"(tokenizer|tekken|vocab|spiece|sentencepiece|merges|bpe)", re.IGNORECASE)


def text_processor(place: Location, model: Any, trust_remote_code: bool, notes: list[str]) -> Any:
    """The tokenizer, made to agree with the model."""
    from transformers import AutoTokenizer

    # Without its files Transformers gives a tokenizer that knows the special tokens and nothing else.
    if not any(_TOKENIZER.match(file) for file in place.files):
        raise InlayError(f"{place.name!r} has no tokenizer. Save one beside the model with tokenizer.save_pretrained.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(place.path, trust_remote_code=trust_remote_code, **place.arguments)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        raise InlayError(
            f"The tokenizer of {place.name!r} cannot be read ({first_line(error)}). Save it again beside the model, "
            "with tokenizer.save_pretrained."
        ) from error
    _check_vocabulary(tokenizer, model, place.name, notes)
    _set_pad_token(tokenizer, model, place.name, notes)
    _set_length(tokenizer, model, notes)
    if tokenizer.mask_token is None and place.model_type in heads("masked-lm") and not _generates(model.config):
        notes.append("no mask token: methods that read the state at a mask do not apply")
    return tokenizer


def _generates(config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", False))


def _check_vocabulary(tokenizer: Any, model: Any, name: str, notes: list[str]) -> None:
    """Every id the tokenizer gives must have a row in the embeddings."""
    rows = model.get_input_embeddings().weight.shape[0]
    beyond = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index >= rows)
    if len(tokenizer) * 100 < rows:
        raise InlayError(
            f"The tokenizer of {name!r} knows {len(tokenizer)} tokens, but the model has {rows}: its vocabulary is "
            "missing. Save the whole tokenizer beside the model with tokenizer.save_pretrained."
        )
    if not beyond:
        return
    added = tokenizer.added_tokens_decoder
    if any(index not in added for index, _ in beyond):
        raise InlayError(
            f"The tokenizer of {name!r} gives ids up to {beyond[-1][0]}, but its embeddings have {rows} rows: they do "
            "not belong together. Save the right tokenizer beside the model."
        )
    names = ", ".join(repr(token) for _, token in beyond[:3])
    notes.append(
        f"{len(beyond)} added tokens ({names}) have no row in the {rows} embeddings and must not occur in texts"
    )
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id >= rows:
        tokenizer.pad_token = None


def _set_pad_token(tokenizer: Any, model: Any, name: str, notes: list[str]) -> None:
    """Padding needs a token, and classifiers of decoders find the last token of a text by it."""
    if tokenizer.pad_token is None:
        for role, words in (("eos_token", "end of text"), ("unk_token", "unknown"), ("bos_token", "start of text")):
            if (token := getattr(tokenizer, role, None)) is not None:
                tokenizer.pad_token = token
                notes.append(f"no pad token: the {words} token {token!r} is used")
                break
        else:
            raise InlayError(
                f"The tokenizer of {name!r} has no pad token and no other special token to pad with. Set one "
                "(tokenizer.pad_token = ...) and save it."
            )
    given = model.config.pad_token_id if hasattr(model.config, "pad_token_id") else None
    if given != tokenizer.pad_token_id:
        if given is not None:
            notes.append(
                f"pad token id {given} in the config, {tokenizer.pad_token_id} in the tokenizer: the latter is used"
            )
        model.config.pad_token_id = tokenizer.pad_token_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id


def _set_length(tokenizer: Any, model: Any, notes: list[str]) -> None:
    """The tokenizer's longest text must be one the positions can hold."""
    limit = _positions(model)
    if limit is None or tokenizer.model_max_length <= limit:
        return
    told = "no length" if tokenizer.model_max_length > UNLIMITED else f"a length of {tokenizer.model_max_length}"
    tokenizer.model_max_length = limit
    notes.append(f"the tokenizer states {told}: {limit} tokens are used, as many as the model has positions")


def _positions(model: Any) -> int | None:
    """How many tokens the model has positions for; RoBERTa and its kin lose those up to the padding index."""
    limit = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            limit = module.num_embeddings - module.padding_idx - 1
            break
    return limit if isinstance(limit, int) and limit > 0 else None


def image_processor(
    place: Location, config: Any, trust_remote_code: bool, image_size: int | None, notes: list[str]
) -> Any:
    """The image processor, or one built from the config, at another size where one is asked for."""
    from transformers import AutoImageProcessor

    arguments = {"trust_remote_code": trust_remote_code, "backend": "pil", **place.arguments}
    try:
        files = (IMAGE_PROCESSOR, "processor_config.json")
        if any(place.has(file) for file in files) or place.model_type == "timm_wrapper":
            processor = AutoImageProcessor.from_pretrained(place.path, **arguments)
        else:
            processor = _built(place, config, notes)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InlayError(
            f"{IMAGE_PROCESSOR} of {place.name!r} was refused: {first_line(error)} Mend it, or remove it to have "
            "images prepared by the architecture's defaults."
        ) from error
    except ImportError as error:
        raise InlayError(f"The image processor of {place.name!r} needs another package: {first_line(error)}") from error
    if getattr(config, "num_channels", 3) == 1:
        from inlay.backbones.grey import grey

        processor = grey(processor)
        notes.append("the model reads one channel: images are made grey")
    if image_size is not None:
        _set_side(processor, image_size)
    return processor


def both_processors(
    place: Location, model: Any, trust_remote_code: bool, image_size: int | None, notes: list[str]
) -> ImageTextProcessor:
    """The image processor and the tokenizer of a model with two towers."""
    image = image_processor(place, model.config, trust_remote_code, image_size, notes)
    _check_size(model, image, place.name)
    tokenizer = text_processor(place, model, trust_remote_code, notes)
    length = int(model.config.text_config.max_position_embeddings)
    # SigLIP reads the last position of 64, and was pretrained without a mask.
    return ImageTextProcessor(image, tokenizer, length, padded=hasattr(model, "logit_bias"))


def _check_size(model: Any, image: Any, name: str) -> None:
    """An error where the images that are given are none that the tower of images reads."""
    stated, side = model.config.vision_config.image_size, image_side(image)
    if stated != side:
        raise InlayError(
            f"{name!r} reads images of {stated} pixels, not {side}. Leave image_size out, or mend the size in "
            f"{IMAGE_PROCESSOR}."
        )


def _built(place: Location, config: Any, notes: list[str]) -> Any:
    """A processor from config.json's own words (input_size, image_mean, ...), else from the architecture's defaults."""
    from transformers import ConvNextImageProcessorPil, ViTImageProcessorPil
    from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, PILImageResampling
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING

    said = place.config
    if "image_mean" in said and "image_std" in said:
        side = (said.get("input_size") or [getattr(config, "image_size", None) or _DEFAULT_SIDE])[-1]
        resample = PILImageResampling[str(said.get("interpolation", "bilinear")).upper()]
        common = {"image_mean": said["image_mean"], "image_std": said["image_std"], "resample": resample}
        notes.append(
            "no preprocessor_config.json: images are prepared as config.json says (input_size, image_mean, ...)"
        )
        if crop := said.get("crop_pct"):
            if side < 384:
                return ConvNextImageProcessorPil(size={"shortest_edge": side}, crop_pct=crop, **common)
            # From 384 pixels on that class squeezes in place of cropping.
            return ViTImageProcessorPil(
                size={"shortest_edge": int(side / crop)}, do_center_crop=True, crop_size=side, **common
            )
        return ViTImageProcessorPil(size={"height": side, "width": side}, **common)
    kind = IMAGE_PROCESSOR_MAPPING[type(config)].get("pil") if type(config) in IMAGE_PROCESSOR_MAPPING else None
    own = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", None)
    side = own or _DEFAULT_SIDE
    side = side if isinstance(side, int) else side[-1]
    processor = kind() if isinstance(kind, type) else ViTImageProcessorPil()
    if not isinstance(kind, type):
        processor.image_mean, processor.image_std = list(IMAGENET_DEFAULT_MEAN), list(IMAGENET_DEFAULT_STD)
    _set_side(processor, side)
    notes.append(
        f"no preprocessor_config.json: images are prepared as {type(processor).__name__} does by default, at {side} "
        "pixels; save the right processor beside the model if its pretraining did otherwise"
    )
    return processor


def image_side(processor: Any) -> int:
    """The side in pixels of the square images that a processor gives."""
    if hasattr(processor, "data_config"):  # timm's
        return int(processor.data_config["input_size"][-1])
    size = (processor.crop_size if getattr(processor, "do_center_crop", False) else None) or processor.size or {}
    for key in ("height", "shortest_edge", "longest_edge"):
        if size.get(key):
            return int(size[key])
    raise InlayError(f"The image processor {type(processor).__name__} does not give images of one size ({dict(size)}).")


def _set_side(processor: Any, side: int) -> None:
    """Make the processor give images of `side` pixels, cropping as much as it did before."""
    if hasattr(processor, "data_config"):
        raise InlayError(f"image_size={side}: the size of a timm model's images is fixed. Leave image_size out.")
    before, size = image_side(processor), dict(processor.size)
    scaled = {key: max(side, round(value * side / before)) for key, value in size.items() if value}
    processor.size = type(processor)(size=scaled).size
    if getattr(processor, "do_center_crop", False):
        processor.crop_size = type(processor)(crop_size={"height": side, "width": side}).crop_size
