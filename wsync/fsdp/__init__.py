"""FSDP trainers: the layouts of their models and of sharded state dicts."""

from wsync.fsdp.model_layout import layout as layout
from wsync.fsdp.model_layout import plain_name as plain_name
