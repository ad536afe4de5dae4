"""Trial classes that do one thing each, right or wrong; `Tiny` is the right one."""

import os
import random

import deepspeed
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from zerotune import (
    AttrDict,
    DataLoader,
    DeepSpeedTrial,
    DeepSpeedTrialContext,
    ModelParallelUnit,
    PyTorchCallback,
    dsat,
    get_ds_config_from_hparams,
    overwrite_deepspeed_config,
)


def samples(count: int, seed: int = 0) -> TensorDataset:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


class Tiny(DeepSpeedTrial):
    """Fits a sum; says what it is called with."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.hparams = context.get_hparams()
        self.engine = context.wrap_model_engine(self.build_engine())

    def build_engine(self):
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=self.ds_config())
        return engine

    def ds_config(self):
        return get_ds_config_from_hparams(self.hparams)

    def build_training_data_loader(self):
        size = self.context.train_micro_batch_size_per_gpu
        return DataLoader(samples(self.hparams.get("samples", 64)), batch_size=size, shuffle=True)

    def build_validation_data_loader(self):
        return DataLoader(samples(self.hparams.get("validation_samples", 8), seed=1), batch_size=2)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        self.say(f"train_batch epoch {epoch_idx} batch {batch_idx}")
        if batch_idx == self.hparams.get("dies_at") and not os.path.exists("died"):  # noqa: PTH110
            open("died", "w").close()  # noqa: PTH123
            os._exit(9)
        loss = self.loss(next(dataloader_iter))
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter, batch_idx):
        self.say(f"evaluate_batch {batch_idx}")
        return {"validation_loss": self.loss(next(dataloader_iter))}

    def loss(self, batch):
        inputs, targets = self.context.to_device(batch)
        return ((self.engine(inputs) - targets) ** 2).mean()

    def say(self, text: str) -> None:
        print(f"> {text}", flush=True)


class Exact(Tiny):
    """Draws nothing."""

    def loss(self, batch):
        self.engine.eval()
        return super().loss(batch)


class Compiled(Tiny):
    """Says which graphs are made of it."""

    class Model(nn.Sequential):
        """One of the user's own: torch's are not compiled in place."""

        def forward(self, inputs):
            return super().forward(inputs)

    def build_engine(self):
        model = self.Model(nn.Linear(4, 8), nn.Linear(8, 1))
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=self.ds_config())
        engine.module.compile(backend=self.noted)
        return engine

    def noted(self, graph, inputs):
        self.say("graph of any size" if any(isinstance(each, torch.SymInt) for each in inputs) else "graph")
        return graph.forward


class DrawsEverywhere(Tiny):
    """Its loss depends on every random generator there is."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx).detach() + drawn


class TakesTwo(Tiny):
    """Takes two micro-batches in each call, and trains on the second."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        next(dataloader_iter)
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class OverwritesItsConfig(Tiny):
    def ds_config(self):
        return overwrite_deepspeed_config(
            self.hparams.deepspeed_config, self.hparams.get("overwrite_deepspeed_args", {})
        )


class PassesItsHparams(Tiny):
    """The hyperparameters are DeepSpeed's configuration."""

    def ds_config(self):
        return self.hparams


class UsesDsat(Tiny):
    def ds_config(self):
        return dsat.get_ds_config_from_hparams(self.context.get_hparams())


class PassesArgs(Tiny):
    """DeepSpeed finds the configuration's path in `args`, and builds the loader."""

    def __init__(self, context):
        self.context = context
        self.hparams = context.get_hparams()
        context.disable_dataset_reproducibility_checks()
        model = nn.Linear(4, 1)
        engine, _, self.loader, _ = deepspeed.initialize(
            args=self.hparams, model=model, model_parameters=model.parameters(), training_data=samples(64)
        )
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self):
        return self.loader


class TorchLoader(Tiny):
    """Returns a loader that is not ours; allowed where `allows` is set."""

    def __init__(self, context):
        super().__init__(context)
        if self.hparams.get("allows"):
            context.disable_dataset_reproducibility_checks()

    def build_training_data_loader(self):
        return torch.utils.data.DataLoader(samples(64), batch_size=2)


class Accumulates(Tiny):
    """Takes its micro-batches itself, `takes` of them."""

    def __init__(self, context):
        super().__init__(context)
        context.disable_auto_grad_accumulation()

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        for _ in range(self.hparams.takes):
            loss = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return loss


class InitialisesItself(Tiny):
    def __init__(self, context):
        self.say = lambda text: print(f"> {text}", flush=True)
        self.say(f"initialised before: {torch.distributed.is_initialized()}")
        deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
        super().__init__(context)


class Returns(Tiny):
    """Returns something else than it should: `returns` says what."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        loss = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return {"none": None, "list": [loss], "vector": {"loss": torch.zeros(3)}}.get(self.hparams.returns, loss)

    def evaluate_batch(self, dataloader_iter, batch_idx):
        metrics = super().evaluate_batch(dataloader_iter, batch_idx)
        if self.hparams.returns == "other keys" and batch_idx == 1:
            return {"other": 1.0}
        if self.hparams.returns == "tensor":
            return metrics["validation_loss"]
        if self.hparams.returns == "too much":
            while True:
                metrics = super().evaluate_batch(dataloader_iter, batch_idx)
        return metrics


class Misbehaves(Tiny):
    """Breaks the API in its `__init__`: `misbehaves` says how."""

    def __init__(self, context):
        self.context = context
        self.hparams = context.get_hparams()
        unit = ModelParallelUnit(0, 1, should_report_metrics=True, should_build_dataloader=True)
        how = self.hparams.misbehaves
        if how == "mpu before the engine":
            context.set_mpu(unit)
        if how == "no engine":
            return
        engine = self.build_engine()
        if how == "wraps the module":
            context.wrap_model_engine(engine.module)
        context.wrap_model_engine(engine)
        if how == "wraps twice":
            context.wrap_model_engine(engine)
        if how == "mpu twice":
            context.set_mpu(unit)
            context.set_mpu(unit)
        if how == "asks too early":
            context.is_epoch_start()


class Speaks(PyTorchCallback):
    """Prints every call; counts epochs in its state."""

    def __init__(self):
        self.epochs = 0

    def on_trial_startup(self, first_batch_idx, checkpoint_uuid):
        print(f"> startup {first_batch_idx} {checkpoint_uuid}", flush=True)

    def on_training_start(self):
        print("> training start", flush=True)

    def on_training_end(self):
        print("> training end", flush=True)

    def on_training_epoch_start(self, epoch_idx):
        print(f"> epoch start {epoch_idx}", flush=True)

    def on_training_epoch_end(self, epoch_idx):
        self.epochs += 1
        print(f"> epoch end {epoch_idx} total {self.epochs}", flush=True)

    def on_training_workload_end(self, avg_metrics, batch_metrics):
        print(f"> workload end {sorted(avg_metrics)} {len(batch_metrics)}", flush=True)

    def on_validation_start(self):
        print("> validation start", flush=True)

    def on_validation_epoch_end(self, outputs):
        print(f"> validation outputs {len(outputs)}", flush=True)

    def on_validation_end(self, metrics):
        print(f"> validation end {sorted(metrics)}", flush=True)

    def on_checkpoint_load_start(self, checkpoint):
        print("> checkpoint load start", flush=True)

    def on_checkpoint_save_start(self, checkpoint):
        print("> checkpoint save start", flush=True)

    def on_checkpoint_write_end(self, checkpoint_dir):
        print("> checkpoint write end", flush=True)

    def on_checkpoint_end(self, checkpoint_dir):
        print(f"> checkpoint end {os.path.basename(checkpoint_dir)}", flush=True)  # noqa: PTH119

    def on_trial_shutdown(self):
        print("> shutdown", flush=True)

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict):
        self.epochs = state_dict["epochs"]


class WithCallbacks(Tiny):
    def build_callbacks(self):
        return {"speaks": Speaks()}


class Reduces(Tiny):
    """Counts the samples that came, by a named function, and by an unnamed one."""

    def __init__(self, context):
        super().__init__(context)
        self.samples = context.wrap_reducer(sum, name="samples")
        self.largest = context.wrap_reducer(
            lambda values: {"largest": max(values), "smallest": min(values)}, for_training=False
        )

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        self.samples.update(self.context.train_micro_batch_size_per_gpu)
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    def evaluate_batch(self, dataloader_iter, batch_idx):
        self.samples.update(2)
        self.largest.update(batch_idx + 10 * self.context.distributed.rank)
        return super().evaluate_batch(dataloader_iter, batch_idx)


class StopsItself(Tiny):
    """Asks to stop on its last rank alone."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        distributed = self.context.distributed
        if batch_idx == 4 and distributed.rank == distributed.size - 1:
            self.context.set_stop_requested(True)
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class Watches(Tiny):
    """Uses the profiler, TensorBoard and the epoch questions."""

    def __init__(self, context):
        super().__init__(context)
        context.set_profiler(activities=[torch.profiler.ProfilerActivity.CPU])
        self.writer = context.get_tensorboard_writer()

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        loss = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        self.writer.add_scalar("loss", loss.item(), batch_idx)
        context = self.context
        assert (context.current_train_epoch(), context.current_train_batch()) == (epoch_idx, batch_idx)
        self.say(f"batch {batch_idx} starts {context.is_epoch_start()} ends {context.is_epoch_end()}")
        return loss


class SavesItsOwn(Tiny):
    """Saves and loads in its own way, beside the engines."""

    def save(self, context, path):
        super().save(context, path)
        if context.distributed.rank == 0:
            (path / "own.txt").write_text("kept")

    def load(self, context, path):
        super().load(context, path)
        self.say(f"own file {(path / 'own.txt').read_text()}")


class TwoStages(Tiny):
    """A pipeline."""

    def build_engine(self):
        model = deepspeed.PipelineModule(
            layers=[nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1)],
            loss_fn=nn.MSELoss(),
            num_stages=self.context.distributed.size,
        )
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=self.ds_config())
        return engine

    def build_training_data_loader(self):
        self.say("builds loaders")
        return super().build_training_data_loader()

    def build_validation_data_loader(self):
        # A stage receives batches of one size.
        size = self.context.train_micro_batch_size_per_gpu
        return DataLoader(samples(self.hparams.get("validation_samples", 16), seed=1), batch_size=size)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        self.say(f"train_batch epoch {epoch_idx} batch {batch_idx}")
        return {"loss": self.engine.train_batch()}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        self.say(f"evaluate_batch {batch_idx}")
        return {"validation_loss": self.engine.eval_batch()}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(samples(64))


class Streams(Tiny):
    """Reads data of unknown length."""

    def __init__(self, context):
        super().__init__(context)
        context.disable_dataset_reproducibility_checks()

    def build_training_data_loader(self):
        return torch.utils.data.DataLoader(Stream(), batch_size=2)


class DiesLater(Tiny):
    """Ends by an exception after some batches."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        if batch_idx == 20:
            raise RuntimeError("enough")
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class NoTrial:
    pass


class VariedLengths(Tiny):
    """Counts the tokens of sentences of different lengths, of which every seventh has 40; its labels stay outside."""

    def build_engine(self):
        model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 1))
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=self.ds_config())
        return engine

    def build_training_data_loader(self):
        sentences = [torch.arange(40 if index % 7 == 6 else 5 + index % 7) for index in range(70)]
        return DataLoader(
            sentences, batch_size=self.context.train_micro_batch_size_per_gpu, collate_fn=self.pad, num_workers=1
        )

    def pad(self, sentences):
        tokens = nn.utils.rnn.pad_sequence(sentences, batch_first=True)
        return tokens, tokens.float()[..., None]

    def loss(self, batch):
        print("length", batch[0].shape[1], flush=True)
        return super().loss(batch)


class HandsOverTwoConfigs(Tiny):
    """Hands its configuration over by a file in `args`, and as a dictionary, whose batch size it reads afterwards."""

    def build_engine(self):
        model = nn.Linear(4, 1)
        own = self.hparams.deepspeed_config
        # The one in `args` does not even exist.
        args = AttrDict({**self.hparams, "deepspeed_config": "no_such_file.json"})
        engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), config=own)
        assert args.deepspeed_config == "no_such_file.json"
        self.say(f"train_batch_size {own.train_batch_size} by attribute, {own['train_batch_size']} by key")
        return engine
