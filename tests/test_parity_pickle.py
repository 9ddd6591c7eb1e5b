"""What `torch.save` wrote is read by PyTorch and runs nothing. See `make parity`."""

import pickle

import numpy as np
import pytest
from conftest import GOLDENS
from safetensors.numpy import load_file

from convert.indicator import convert_indicator
from dllm_jax import DllmError
from dllm_jax.indicator import load_indicator

torch = pytest.importorskip("torch")
SOURCE = GOLDENS / "ni-indicator-llada-tiny.safetensors"


def test_a_pickled_indicator_is_that_of_safetensors(tmp_path):
    torch.save({name: torch.from_numpy(x) for name, x in load_file(SOURCE).items()}, tmp_path / "indicator.pth")
    config = convert_indicator(tmp_path / "indicator.pth", tmp_path / "out")
    assert config == convert_indicator(SOURCE, tmp_path / "wanted")
    found, wanted = load_indicator(tmp_path / "out").params, load_indicator(tmp_path / "wanted").params
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, wanted[name])


def harmful(path):
    class Evil:
        def __reduce__(self):
            return print, ("it ran",)

    torch.save({"a": Evil()}, path)


def another(path):
    path.write_bytes(pickle.dumps({"a": 1}))


def empty(path):
    path.touch()


@pytest.mark.parametrize("write", [harmful, another, empty])
def test_a_pickle_of_anything_else_is_refused(tmp_path, capsys, write):
    write(tmp_path / "weights.pth")
    with pytest.raises(DllmError, match=r"weights\.pth is no state dict of PyTorch"):
        convert_indicator(tmp_path / "weights.pth", tmp_path / "out")
    assert not (tmp_path / "out").exists() and "it ran" not in capsys.readouterr().out
