"""Model families: rules that name a trainer's parameters as Hugging Face checkpoints do."""

from wsync.families import blocks as blocks
from wsync.families.registry import register as register
from wsync.families.rules import Rule as Rule
from wsync.families.rules import RuleError as RuleError
from wsync.families.rules import Target as Target
from wsync.families.tables import RUNTIME as RUNTIME
