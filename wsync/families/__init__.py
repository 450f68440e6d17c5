"""Model families: rules that name a trainer's parameters as Hugging Face checkpoints do."""

from wsync.families import blocks as blocks
from wsync.families.rules import Rule as Rule
from wsync.families.rules import RuleError as RuleError
from wsync.families.rules import Target as Target
from wsync.families.runtime_names import RUNTIME as RUNTIME
from wsync.families.user_families import register as register
