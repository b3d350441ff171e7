"""Text in, batches out: sources, tokenizers, the token cache, packing, order, and evaluation windows."""

from moesys.data.batch import IGNORED, Batch, EvaluationBatch
from moesys.data.dataset import TokenDataset
from moesys.data.evaluation import (
    bits_per_byte,
    dataset_xz_bits_per_byte,
    evaluation_batches,
    xz_bits_per_byte,
)
from moesys.data.packing import TrainingStream
from moesys.data.prepare import Data, open_data, open_text
from moesys.data.tokenizer import StreamDecoder, Tokenizer, bytes_tokenizer, train_bpe

__all__ = [
    "IGNORED",
    "Batch",
    "Data",
    "EvaluationBatch",
    "StreamDecoder",
    "TokenDataset",
    "Tokenizer",
    "TrainingStream",
    "bits_per_byte",
    "bytes_tokenizer",
    "dataset_xz_bits_per_byte",
    "evaluation_batches",
    "open_data",
    "open_text",
    "train_bpe",
    "xz_bits_per_byte",
]
