"""Samples for a model, from its forward's signature and its task; each has as many labels as the others."""

from __future__ import annotations

import inspect
from typing import Any

from .configurations import VOCABULARY

LENGTH = 12
SOUND = 8000
# The tasks by the names of transformers' mappings; the first that names a class is its task. None: it is left out.
TASKS: dict[str, str | None] = {
    "CAUSAL_LM": "causal LM",
    "SEQ_TO_SEQ_CAUSAL_LM": "seq2seq LM",
    "MASKED_LM": "masked LM",
    "SEQUENCE_CLASSIFICATION": "sequence classification",
    "TOKEN_CLASSIFICATION": "token classification",
    "TABLE_QUESTION_ANSWERING": "table question answering",
    "VISUAL_QUESTION_ANSWERING": "visual question answering",
    "DOCUMENT_QUESTION_ANSWERING": "question answering",
    "QUESTION_ANSWERING": "question answering",
    "MULTIPLE_CHOICE": "multiple choice",
    "NEXT_SENTENCE_PREDICTION": "next sentence",
    "SPEECH_SEQ_2_SEQ": "speech seq2seq",
    "CTC": "CTC",
    "AUDIO_FRAME_CLASSIFICATION": "audio frame classification",
    "AUDIO_CLASSIFICATION": "audio classification",
    "AUDIO_XVECTOR": "audio x-vector",
    "VIDEO_CLASSIFICATION": "video classification",
    "IMAGE_CLASSIFICATION": "image classification",
    "SEMANTIC_SEGMENTATION": "semantic segmentation",
    "DEPTH_ESTIMATION": "depth estimation",
    "IMAGE_TEXT_TO_TEXT": "image-text to text",
    "VISION_2_SEQ": "image-text to text",
    "MULTIMODAL_LM": "image-text to text",
    "PRETRAINING": "pretraining",
    "CAUSAL_IMAGE_MODELING": "causal image modeling",
    "IMAGE_TO_IMAGE": "image to image",
    "TEXT_TO_SPECTROGRAM": "text to spectrogram",
    "TEXT_TO_WAVEFORM": "text to waveform",
    "RNNT": "transducer",
    "TDT": "transducer",
}
ONE_CLASS = {
    "sequence classification",
    "image classification",
    "audio classification",
    "video classification",
    "audio x-vector",
}
# Models of text, as far as the signature says, that want an image beside it.
IMAGES = ("git", "vilt", "kosmos-2", "idefics")


def task_of(mappings: list[str]) -> str | None:
    return next((task for name, task in TASKS.items() if f"MODEL_FOR_{name}_MAPPING_NAMES" in mappings), None)


def setting(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these settings that the configuration, or one within it, has."""
    from transformers import PretrainedConfig

    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return value
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig) and (found := setting(value, *names)) is not None:
            return found
    return default


class Maker:
    """Makes the samples of one model, without the batch's dimension; always the same ones."""

    def __init__(self, cls: type, config: Any, task: str) -> None:
        import torch

        self.names = inspect.signature(cls.forward).parameters  # type: ignore[attr-defined]
        self.config, self.task = config, task
        self.generator = torch.Generator().manual_seed(0)
        self.vocabulary = setting(config, "vocab_size", default=VOCABULARY) - 1  # ImageGPT predicts one less

    def integers(self, low: int, high: int, *shape: int) -> Any:
        import torch

        return torch.randint(low, high, shape, generator=self.generator)

    def floats(self, *shape: int) -> Any:
        import torch

        return torch.randn(shape, generator=self.generator)

    def tokens(self, *shape: int) -> Any:
        return self.integers(16, self.vocabulary, *shape)

    def make(self, count: int, decoder: bool = False) -> list[dict[str, Any]]:
        """So many samples; decoder: with the decoder's inputs, for one whose labels are taken away."""
        made = []
        for _ in range(count):
            sample = self.inputs()
            sample.update(self.labels(sample))
            if decoder:
                sample["decoder_input_ids"] = self.tokens(LENGTH)
            made.append(sample)
        return made

    def inputs(self) -> dict[str, Any]:
        names, kind = self.names, self.config.model_type
        if "input_ids" in names:
            return self.text()
        if kind == "speech-encoder-decoder":
            return {"input_values": self.floats(SOUND)}
        if "pixel_values" in names:
            frames = (setting(self.config, "num_frames", default=4),) if self.task == "video classification" else ()
            return {"pixel_values": self.floats(*frames, *self.image())}
        if "pixel_values_videos" in names:
            frames = (setting(self.config, "frames_per_clip", "num_frames", default=4),)
            return {"pixel_values_videos": self.floats(*frames, *self.image())}
        if "input_features" in names:
            return self.spectrum()
        if kind == "audio-spectrogram-transformer":
            return {"input_values": self.floats(self.config.max_length, self.config.num_mel_bins)}
        return {"input_values": self.floats(SOUND)}

    def text(self) -> dict[str, Any]:
        import torch

        names, config = self.names, self.config
        shape = (2, LENGTH) if self.task == "multiple choice" else (LENGTH,)
        sample = {"input_ids": self.tokens(*shape)}
        if self.task == "sequence classification" and config.is_encoder_decoder:
            sample["input_ids"][-1] = setting(config, "eos_token_id")
        if config.model_type == "longformer":  # whose global attention is on the separators
            sample["input_ids"][..., [3, 6, 9]] = config.sep_token_id
        if "attention_mask" in names:
            sample["attention_mask"] = torch.ones(shape, dtype=torch.long)
        if "bbox" in names:
            sample["bbox"] = torch.tensor([1, 2, 10, 12]).expand(*shape, 4).clone()
        image = names.get("pixel_values")
        if image is not None and (image.default is image.empty or config.model_type in IMAGES):
            sample["pixel_values"] = self.floats(*self.image())
        return sample

    def image(self) -> tuple[int, int, int]:
        size = setting(self.config, "crop_size", "image_size", "img_size", default=32)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return setting(self.config, "num_channels", "in_channels", default=3), height, width

    def spectrum(self) -> dict[str, Any]:
        import torch

        names = ("feature_projection_input_dim", "feature_size", "num_mel_bins")
        bins = setting(self.config, *names, default=80)
        if self.config.model_type == "whisper":
            return {"input_features": self.floats(bins, 128)}
        sample = {"input_features": self.floats(64, bins)}
        if self.config.model_type in ("parakeet_ctc", "lasr_ctc"):
            sample["attention_mask"] = torch.ones(64, dtype=torch.bool)
        return sample

    def labels(self, sample: dict[str, Any]) -> dict[str, Any]:
        import torch

        task, classes, problem = self.task, self.config.num_labels, getattr(self.config, "problem_type", None)
        if problem == "regression":
            return {"labels": self.floats() if classes == 1 else self.floats(classes)}
        if problem == "multi_label_classification":
            return {"labels": self.integers(0, 2, classes).float()}
        if task == "question answering" or "labels" not in self.names:
            return {name: self.integers(1, LENGTH, 1)[0] for name in ("start_positions", "end_positions")}
        if task in ONE_CLASS:
            return {"labels": self.integers(0, classes, 1)[0]}
        if task in ("next sentence", "multiple choice"):
            return {"labels": self.integers(0, 2, 1)[0]}
        if task in ("token classification", "table question answering"):
            return {"labels": self.integers(0, classes, LENGTH)}
        if task == "visual question answering" and "decoder_input_ids" not in self.names:
            return {"labels": self.floats(classes).sigmoid()}
        if task == "semantic segmentation":
            return {"labels": self.integers(0, classes, *sample["pixel_values"].shape[-2:])}
        if task == "depth estimation":
            return {"labels": self.floats(*sample["pixel_values"].shape[-2:]).abs() + 0.1}
        if task == "CTC":
            return {"labels": self.integers(1, self.vocabulary, 4)}
        if task == "audio frame classification":
            return {"labels": torch.nn.functional.one_hot(self.integers(0, classes, self.frames()), classes)}
        labels = self.tokens(LENGTH)
        if "input_ids" in sample and not self.config.is_encoder_decoder:
            labels = sample["input_ids"].clone()
            labels[0] = -100  # what a shift leaves out is not to be counted either
        pairs = [name for name in ("next_sentence_label", "sentence_order_label") if name in self.names]
        return {"labels": labels, **{name: self.integers(0, 2, 1)[0] for name in pairs}}

    def frames(self) -> int:
        """How many frames an encoder makes of a sample's sound."""
        if not hasattr(self.config, "conv_kernel"):
            return 64
        length = SOUND
        for kernel, stride in zip(self.config.conv_kernel, self.config.conv_stride, strict=True):
            length = (length - kernel) // stride + 1
        return length
