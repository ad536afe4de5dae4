"""Ranks that read the same samples."""

import deepspeed
from torch import nn

from model_def import Tiny
from zerotune import ModelParallelUnit


class SharesSamples(Tiny):
    """All ranks are one replica: by Ulysses, of which DeepSpeed knows, or by groups that DeepSpeed does not know."""

    def __init__(self, context):
        super().__init__(context)
        if not self.hparams.ulysses:
            context.set_mpu(ModelParallelUnit(0, 1, context.distributed.rank == 0, True))

    def build_engine(self):
        model = nn.Linear(4, 1)
        mpu = None
        if self.hparams.ulysses:
            from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu

            mpu.initialize_sequence_parallel(self.context.distributed.size)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=self.ds_config(), mpu=mpu
        )
        return engine

    def loss(self, batch):
        inputs, _ = self.context.to_device(batch)
        self.say(f"read {inputs.shape[0]} {inputs.sum().item():.4f}")
        return super().loss(batch)
