"""The demo model's tokenizer: byte-level BPE over the training text, and one token for each key and value."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ENTRIES = 2048
END_OF_TEXT = "<|endoftext|>"
KEYS = tuple(f"<key:{i:02}>" for i in range(64))
VALUES = tuple(f"<value:{i:02}>" for i in range(64))


def train_tokenizer(documents: Sequence[str]) -> PreTrainedTokenizerFast:
    """Learn merges from the documents; every byte has an entry, so decoding gives back the exact text.

    Keys and values are added whole: a trial then costs one token each, and as plain text the same trial still
    reads sensibly to a model with another tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ENTRIES - len(KEYS) - len(VALUES),
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in KEYS + VALUES])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
