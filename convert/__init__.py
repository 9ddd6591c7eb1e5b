"""Converts checkpoints between the hub's safetensors format and ours: `python -m convert llada --source A --out B`."""

from convert.adapters import convert_adapters
from convert.check import verify
from convert.to_hub import export
from convert.to_jax import convert
from convert.upload import push

__all__ = ["convert", "convert_adapters", "export", "push", "verify"]
