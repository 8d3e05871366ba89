"""Which public methods of the Tinker SDK work against a server: all that ``inspect`` finds are called.

python tests/tinker_probe.py http://127.0.0.1:8001            prints the share, and what does not work
python tests/tinker_probe.py http://127.0.0.1:8001 --table    prints the table of docs/tinker.md
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tinker
from tinker import types
from tinker.lib.api_future_impl import QueueState

TEXT = [276, 28, 223, 19, 20, 262, 223, 21]
CLIENTS = {
    "ServiceClient": tinker.ServiceClient,
    "TrainingClient": tinker.TrainingClient,
    "SamplingClient": tinker.SamplingClient,
    "RestClient": tinker.RestClient,
}


def methods() -> list[str]:
    """All public ones, as Class.name."""
    return [
        f"{name}.{method}"
        for name, of in CLIENTS.items()
        for method, _ in inspect.getmembers(of, inspect.isfunction)
        if not method.startswith("_")
    ]


class Probe:
    """Clients of one server, and arguments for every method; ``_async`` forms get those of the plain ones."""

    def __init__(self, url: str, key: str = "tml-local") -> None:
        self.service = tinker.ServiceClient(base_url=url, api_key=key, project_id="p")
        self.rest = tinker.RestClient(base_url=url, api_key=key)
        self.model = self.rest.get_server_capabilities().result().supported_models[0].model_name or ""
        self.training = self.service.create_lora_training_client(self.model, rank=2).result()
        self.state = self.training.save_state("probe").result().path
        self.path = self.training.save_weights_for_sampler("probe").result().path
        self.outside = self.training.save_weights_external("probe").result().path
        self.sampling = self.training.create_sampling_client(self.path).result()
        self.names = 0

    def arguments(self) -> dict[str, tuple[Any, ...]]:
        """By method; a call without any is ()."""
        run, self.names = self.training.model_id, self.names + 1
        name, session = f"n{self.names}", run.split(":")[0]
        made = self.training.save_weights_for_sampler(f"gone{self.names}").result().path
        inputs = {"target_tokens": np.array(TEXT[1:]), "weights": np.ones(len(TEXT) - 1, np.float32)}
        rows = [types.Datum(model_input=types.ModelInput.from_ints(TEXT[:-1]), loss_fn_inputs=inputs)]
        prompt, base = types.ModelInput.from_ints(TEXT), self.model

        def loss(data: Any, logprobs: Any) -> Any:
            return -sum(one.sum() for one in logprobs), {}

        def traced(logprobs: Any) -> Any:
            return -logprobs.sum(), {}

        one = (f"sampler_weights/gone{self.names}",)
        return {
            "ServiceClient.copy_weights": (self.state,),
            "ServiceClient.create_custom_loss": (traced, {"logprobs": 1}),
            "ServiceClient.create_lora_training_client": (base, 2),
            "ServiceClient.create_sampling_client": (None, base),
            "ServiceClient.create_training_client_from_state": (self.state,),
            "ServiceClient.create_training_client_from_state_with_optimizer": (self.state,),
            "ServiceClient.close": ("success",),
            "TrainingClient.create_sampling_client": (self.path,),
            "TrainingClient.forward": (rows, "cross_entropy"),
            "TrainingClient.forward_backward": (rows, "cross_entropy"),
            "TrainingClient.forward_backward_custom": (rows, loss),
            "TrainingClient.load_state": (self.state,),
            "TrainingClient.load_state_with_optimizer": (self.state,),
            "TrainingClient.optim_step": (types.AdamParams(),),
            "TrainingClient.save_state": (name,),
            "TrainingClient.save_weights_external": (name,),
            "TrainingClient.save_weights_for_sampler": (name,),
            "SamplingClient.compute_logprobs": (prompt,),
            "SamplingClient.create": (self.sampling.holder,),
            "SamplingClient.from_sampler_handle": (self.sampling.get_sampler_handle(),),
            "SamplingClient.on_queue_state_change": (QueueState.ACTIVE, None),
            "SamplingClient.sample": (prompt, 1, types.SamplingParams(max_tokens=2)),
            "RestClient.assign_session_project": (session, "p"),
            "RestClient.copy_weights": (self.path, "p"),
            "RestClient.delete_checkpoint": (run, *one),
            "RestClient.delete_checkpoint_from_tinker_path": (made,),
            "RestClient.export_session_trace": (session,),
            "RestClient.get_audit_log": (),
            "RestClient.get_billing_usage": (),
            "RestClient.get_external_weights_urls": (self.outside,),
            "RestClient.get_sampler": (f"{session}:sample:0",),
            "RestClient.get_session": (session,),
            "RestClient.get_training_run": (run,),
            "RestClient.get_training_run_by_tinker_path": (self.path,),
            "RestClient.get_weights_info_by_tinker_path": (self.state,),
            "RestClient.list_checkpoints": (run,),
            "RestClient.publish_checkpoint_from_tinker_path": (self.path,),
            "RestClient.search_sessions": (types.SessionSearchRequest(),),
            "RestClient.set_checkpoint_ttl_from_tinker_path": (self.path, 3600),
            "RestClient.unpublish_checkpoint_from_tinker_path": (self.path,),
        }

    def works(self, method: str) -> str:
        """ "" or what was raised."""
        client, name = method.split(".")
        target = {"ServiceClient": self.service, "TrainingClient": self.training}
        target |= {"SamplingClient": self.sampling, "RestClient": self.rest}
        given = self.arguments().get(method.removesuffix("_async"), ())
        more = {"base_model": self.model} if method == "SamplingClient.create" else {}
        more |= {"api_key": "tml-local"} if name == "from_sampler_handle" else {}
        try:
            _waited(getattr(target[client], name), given, more)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        return ""


def _waited(function: Callable[..., Any], given: tuple[Any, ...], more: dict[str, Any]) -> None:
    async def run() -> Any:
        return await function(*given, **more)

    if inspect.iscoroutinefunction(function) or function.__name__.endswith("_async"):
        found = asyncio.run(asyncio.wait_for(run(), 60))
    else:
        found = function(*given, **more)
    if hasattr(found, "result"):
        found.result(60)


def probe(url: str) -> dict[str, str]:
    """Method -> "" where it works, else what was raised. The session is closed at the end."""
    probed = Probe(url)
    names = sorted(methods(), key=lambda method: method == "ServiceClient.close")
    return {method: probed.works(method) for method in names}


def table(found: dict[str, str]) -> str:
    """Share and methods by client, in Markdown. A name stands for its ``_async`` form too; refused where
    one of them is."""
    works = sum(not error for error in found.values())
    counted = "a method and its `_async` form count as two, and have one name below"
    lines = [f"{works} of {len(found)} public methods of the four clients work ({counted}).", ""]
    lines += ["| client | works | refused |", "|---|---|---|"]
    for client in CLIENTS:
        mine = {method.split(".")[1]: error for method, error in found.items() if method.startswith(client)}
        refused = {name.removesuffix("_async") for name, error in mine.items() if error}
        names = sorted({name.removesuffix("_async") for name in mine} - refused)
        cells = (", ".join(f"`{name}`" for name in some) for some in (names, sorted(refused)))
        lines.append(f"| `{client}` | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = probe(sys.argv[1])
    if "--table" in sys.argv:
        print(table(found))
        sys.exit()
    broken = {method: error for method, error in found.items() if error}
    print(f"{len(found) - len(broken)} of {len(found)} methods work ({1 - len(broken) / len(found):.0%})")
    for method, error in broken.items():
        print(f"  {method}: {error}")
