"""The engine of the simulation: one foreseen run inside its rank, from what it replaces to the record at its end."""

import sys
from pathlib import Path
from typing import Any

from zerotune.trial_lib.messages.folders import read_layer
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun, ForeseeOrder
from zerotune.trial_lib.messages.orders import seconds_since
from zerotune.trial_lib.plan.simulate import checkpoint_headers, patches
from zerotune.trial_lib.plan.simulate.engine_moments import EngineMoments, name_gradients, name_kinds
from zerotune.trial_lib.plan.simulate.fake_tensors import FakeTensors
from zerotune.trial_lib.plan.simulate.logs import sentence_of
from zerotune.trial_lib.rank import batch_source, huggingface, interception, redirects, sandbox
from zerotune.trial_lib.rank.device import status_bytes
from zerotune.trial_lib.rank.interception import intercept
from zerotune.trial_lib.rank.patching import install
from zerotune.trial_lib.rank.program_facts import ProgramFacts
from zerotune.trial_lib.rank.records import ImportedModules, versions_here
from zerotune.trial_lib.rank.torch_functions import PlainSteps
from zerotune.trial_lib.rank.user_files import LayeredFiles, UserFiles


class Simulation:
    """The run of one order. It observes `deepspeed.initialize`.

    `finished` is called after the last step with an empty text, or with the reason why there is none.
    """

    def __init__(self, order: ForeseeOrder, finished: Any) -> None:
        self._order, self._finished = order, finished
        self._facts = ProgramFacts()
        self._plain_steps = PlainSteps(lambda outcome, reason: finished(reason))
        self._fake = FakeTensors(order)
        self._memory, self._operations = self._fake.memory, self._fake.operations
        self._fake.ends_with = lambda error: finished(sentence_of(error))
        self._moments = EngineMoments(self._fake, self._memory, self._operations, self._stepped)
        self._engine: Any = None
        self._import_s = 0.0
        self._imports = ImportedModules()
        self._files: UserFiles
        self._layered: LayeredFiles | None = None

    def install(self) -> None:
        """Replaces what has to be replaced, and enters the mode. Call it before the program runs."""
        order, scratch = self._order, Path(self._order.scratch)
        install(patches.WORLD, self._fake)
        intercept(order.overrides, self._facts, self, order.turned)
        batch_source.note_parsers()
        # The program's files, and what the Trainer and trackers write.
        layer = read_layer(scratch)
        self._layered = None if layer is None else LayeredFiles(layer)
        device = None if self._layered is None else self._layered.device
        before, model_dir = order.protected_before, Path(order.model_dir)
        self._files = sandbox.install(scratch, before, model_dir, device, order.hidden)
        to_save = self._files.to_prepare
        huggingface.install(self._facts, order.overrides, scratch, to_save, checkpoint_headers.saves_none)
        install(patches.LENGTH, self._facts)
        interception.install_zero_init(order.overrides, self._facts)
        redirects.install_trackers(scratch, self._files)
        # The logs, and the mode.
        install(patches.MOMENTS, self._moments)
        self._plain_steps.begin()
        self._operations.install()
        install(patches.PROGRAM, self._fake)
        self._imports.follow()
        self._fake.__enter__()  # type: ignore[no-untyped-call]

    @property
    def has_engine(self) -> bool:
        return self._engine is not None

    def initialize_called(self) -> None:
        if self._engine is None:
            self._import_s = seconds_since(self._order.launched_at)
        self._fake.in_engine = True

    def engine_built(self, engine: Any) -> None:
        self._fake.in_engine = False
        if self._engine is not None:
            return
        self._plain_steps.end()
        self._engine = engine
        self._facts.note_varied(self._order.varied_options)
        name_kinds(engine, self._memory)
        name_gradients(engine, self._memory)
        self._operations.name_modules(engine.module)
        self._moments.watch(engine)

    def frozen_engine_built(self) -> None:
        """An engine that does not train has memory and work like any other module."""
        self._fake.in_engine = False

    def group_destroyed(self) -> None: ...

    def _stepped(self, steps: int) -> None:
        name_kinds(self._engine, self._memory)
        if self._layered is not None and not self._files.is_training:
            self._layered.note_prepared(self._files.filled)
        self._files.training_began()
        if steps >= self._order.steps:
            self._moments.load_more()
            self._finished("")

    def record(self, stopped: str) -> ForeseenRun:
        """`stopped` is the reason why the run has not come to its last step; empty if it has."""
        storages, events, moments = self._memory.record()
        beside, rows = self._moments.workers.of_a_batch, self._moments.rows
        self._facts.note(batch_varies=self._facts.found.batch_varies or rows is not None)
        decoder = {} if self._engine is None else decoder_numbers(self._engine.module)
        self._facts.note(samples_per_epoch=self._moments.samples_per_epoch, decoder=decoder)
        return ForeseenRun(
            world=self._order.world,
            **self._moments.of_engine(),
            tokens=self._moments.tokens_of_a_row,
            rows=rows,
            program=self._facts.to_json(),
            dtypes=tuple(self._operations.dtypes),
            modules=tuple(self._operations.modules),
            storages=storages,
            events=events,
            moments=moments,
            operations=self._operations.record(),
            asks=self._fake.asks.record(),
            loading_s=tuple(self._moments.loading_s) if beside is None else (beside,),
            loads_beside=beside is not None,
            import_s=self._import_s,
            seconds=seconds_since(self._order.launched_at),
            peak_bytes=status_bytes("VmHWM"),
            data_bytes=self._moments.data_bytes,
            notes=(*self._moments.notes, *sorted(self._fake.notes)),
            imported=tuple(self._imports.found()),
            versions=versions_here(),
            stopped=stopped,
        )


_DECODER = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocabulary": "vocab_size",
}
# In the configurations of Mixtral, of Qwen and of DeepSeek.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def decoder_numbers(module: Any) -> dict[str, int]:
    # As `ProgramProfile.decoder` has it, from the configuration of a model of transformers.
    config = getattr(module, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return {}
    found = {name: getattr(config, theirs, None) for name, theirs in _DECODER.items()}
    found["kv_heads"] = getattr(config, "num_key_value_heads", None) or found["heads"]
    if head := getattr(config, "head_dim", None):
        found["head_size"] = head
    if any(getattr(config, name, 0) for name in _EXPERTS):
        found |= _experts(config)
    sizes = {name: size for name, size in found.items() if isinstance(size, int)}
    return sizes if len(sizes) == len(found) else {}


def _experts(config: Any) -> dict[str, Any]:
    def first(*names: str) -> Any:
        return next((value for name in names if (value := getattr(config, name, None))), None)

    ffn, layers = first("moe_intermediate_size", "intermediate_size"), config.num_hidden_layers
    every = first("decoder_sparse_step") or 1
    plain = set(first("mlp_only_layers") or ()) | set(range(first("first_k_dense_replace") or 0))
    return {
        "experts": first(*_EXPERTS),
        "chosen": first("num_experts_per_tok"),
        "expert_ffn": ffn,
        "shared_ffn": first("shared_expert_intermediate_size") or (first("n_shared_experts") or 0) * (ffn or 0),
        "dense_layers": sum(layer in plain or (layer + 1) % every > 0 for layer in range(layers)),
        "by_autoep": _is_known_to_autoep(config),
    }


def _is_known_to_autoep(config: Any) -> int:
    try:
        from deepspeed.module_inject.auto_ep_presets import registry
    except ImportError:  # before DeepSpeed 0.19
        return 0
    name = registry.preset_name_for_hf_model_type(getattr(config, "model_type", ""))
    if name is None:
        return 0
    # DeepSpeed 0.19.8 asks for recorded scores of routers in a way that transformers 5.23 no longer knows.
    kept = getattr(sys.modules.get("transformers.utils.output_capturing"), "_CAN_RECORD_REGISTRY", {})
    adapter = registry.get_preset_adapter(registry.get_preset(name).preset_adapter)
    return int(type(kept).get is dict.get or not hasattr(adapter, "class_name_fragments"))
