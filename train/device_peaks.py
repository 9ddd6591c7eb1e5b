"""Rates of dense matrix products in devices' data sheets, for utilisation that can be compared."""

import types
from collections.abc import Mapping

_TERA = 1e12

# By `jax.Device.device_kind`: TFLOP/s with bfloat16 and with float32 operands, the latter as JAX multiplies them by
# default: rounded to bfloat16 on TPUs, to TF32 on NVIDIA's GPUs. None where the device has no such products.
# Sources. TPUs: cloud.google.com/tpu/docs, "Peak compute per chip"; a device is a chip, but half of one on v2, v3 and
# TPU7x. GPUs: NVIDIA's data sheets of A100, H100, H200, L4 and T4, and of HGX B200; where they count sparse products,
# half of that.
_SHEETS: Mapping[str, tuple[float | None, float | None]] = types.MappingProxyType(
    {
        "TPU v3": (61.5, 61.5),
        "TPU v4": (275.0, 275.0),
        "TPU v5 lite": (197.0, 197.0),
        "TPU v5e": (197.0, 197.0),
        "TPU v5": (459.0, 459.0),
        "TPU v5p": (459.0, 459.0),
        "TPU v6 lite": (918.0, 918.0),
        "TPU v6e": (918.0, 918.0),
        "TPU7x": (1153.5, 1153.5),
        "NVIDIA A100": (312.0, 156.0),
        "NVIDIA H100 80GB HBM3": (989.5, 494.5),  # SXM
        "NVIDIA H100 PCIe": (756.5, 378.0),
        "NVIDIA H100 NVL": (835.5, 417.5),
        "NVIDIA H200": (989.5, 494.5),
        "NVIDIA H200 NVL": (835.5, 417.5),
        "NVIDIA L4": (121.0, 60.0),
        "NVIDIA B200": (2250.0, 1125.0),
        "Tesla T4": (None, 8.1),
    }
)
_OF_ALL_FORMS = ("NVIDIA A100",)  # whose forms (SXM, PCIe, 40 or 80 GB) have one rate


def data_sheet(kind: str, dtype: str) -> float | None:
    """Floating-point operations per second of a device, None where no data sheet is known here.

    Args:
        kind: `jax.Device.device_kind`.
        dtype: "bfloat16" or "float32".
    """
    kind = next((name for name in _OF_ALL_FORMS if kind.startswith((f"{name}-", f"{name} "))), kind)
    rates = dict(zip(("bfloat16", "float32"), _SHEETS.get(kind, (None, None)), strict=True))
    rate = rates[dtype]
    return None if rate is None else rate * _TERA
