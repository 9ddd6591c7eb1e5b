"""The models of a comparison, each loaded once."""

from typing import Any

from jax.sharding import Mesh
from rich.console import Console

import dllm_jax
from dllm_jax import DllmError, Model
from dllm_jax.config import Quantize
from evals.tasks import Task
from samplers.config.sampler_config import SamplerConfig


class Models:
    """Models by folder or name; what was loaded stays.

    Args:
        usual: the model of samplers that name none: a model, its folder or name; None where there is no such.
        dtype, quantize, mesh: of what is loaded, as in `dllm_jax.load`.
    """

    def __init__(
        self,
        usual: Model | str | None = None,
        dtype: str | None = None,
        quantize: Quantize | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self._usual, self._how = usual, dict[str, Any](dtype=dtype, quantize=quantize, mesh=mesh)
        self._loaded: dict[str, Model] = {}

    def load(self, path_or_name: str) -> Model:
        """A model by its folder or name."""
        if path_or_name not in self._loaded:
            with Console(stderr=True, force_jupyter=False).status(f"loading {path_or_name}", spinner="line"):
                self._loaded[path_or_name] = dllm_jax.load(path_or_name, **self._how)
        return self._loaded[path_or_name]

    def of(self, sampler: SamplerConfig) -> Model:
        """The model that a sampler runs.

        Raises:
            DllmError: when neither the sampler nor anything else names one, and as `dllm_jax.load`.
        """
        found = sampler.model or self._usual
        if found is None:
            raise DllmError(f"no model was named for {sampler}; pass --model DIR_OR_NAME, or write {sampler}@DIR")
        return self.load(found) if isinstance(found, str) else found

    def build(self, sampler: SamplerConfig, task: Task) -> tuple[Model, Task, Any]:
        """The sampler's model, the task in its tokens, and the sampler itself.

        Raises:
            DllmError: as `of`, for a model that does not fit the task, and as `SamplerConfig.build`.
        """
        model = self.of(sampler)
        bound = task.bind(model)
        return model, bound, sampler.anywhere().for_canvas(bound).load_verifier(self.load).build(model)
