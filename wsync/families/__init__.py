"""Model families: rules that name a trainer's parameters as Hugging Face checkpoints do."""

from wsync.families.tables import RUNTIME as RUNTIME
