"""A cluster and a transformer on it: what an optimizer step takes in seconds and bytes, by formula.

Sources: memory of states and volume of communication, ZeRO (arXiv 1910.02054, sections 3 and 7); activations and
recomputation, Korthikanti et al. (arXiv 2205.05198, equations 1 and 2); FLOPs, Narayanan et al. (arXiv 2104.04473,
equation 3, without the vocabulary); time of a collective, alpha + bytes / bandwidth (Hockney 1994), in rings within and
between nodes; optimizer states on the host, ZeRO-Offload (arXiv 2101.06840). Constants are of the order of an A100 and
its hosts: what is compared is searches, not machines.
"""

from dataclasses import dataclass
from math import exp

DEVICES_A_NODE = 8
DEVICE_BYTES = 80e9
PEAK_FLOPS = 312e12
BEST_EFFICIENCY = 0.55
HALF_EFFICIENT_TOKENS = 1500  # in a micro-batch: where kernels run at half of their best
NODE_BANDWIDTH, NETWORK_BANDWIDTH = 230e9, 22e9  # bytes/s of a device
NODE_ALPHA, NETWORK_ALPHA = 4e-6, 12e-6  # s a hop
HOST_BANDWIDTH = 12e9  # bytes/s of a device, all of a node's at work
HOST_ADAM = 1.2e9  # parameters/s of a node


@dataclass(frozen=True)
class Transformer:
    """A decoder in bf16 with Adam.

    Attributes:
        layers: their number.
        hidden: width.
        sequence: tokens of a sample.
        recompute: whether only the layers' inputs are kept for the backward pass.
    """

    layers: int
    hidden: int
    sequence: int
    recompute: bool

    @property
    def params(self) -> int:
        """Parameters of the whole model."""
        return 12 * self.layers * self.hidden**2

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward of one sample, recomputation left out."""
        return 72 * self.sequence * self.layers * self.hidden**2 * (1 + self.sequence / (6 * self.hidden))

    @property
    def activation_bytes(self) -> float:
        """Bytes that one sample keeps for the backward pass."""
        layer = 34 * self.sequence * self.hidden
        return 2 * self.sequence * self.hidden * self.layers + layer if self.recompute else layer * self.layers


@dataclass(frozen=True)
class Zero:
    """The ZeRO settings that the model knows; sizes in elements.

    Attributes:
        stage: 0 to 3.
        offload_optimizer: whether Adam and its states are the host's.
        overlap: whether reduction goes on beside the backward pass.
        reduce_bucket: elements reduced at a time.
        allgather_bucket: elements gathered at a time (stages 1 and 2).
        prefetch_bucket: elements gathered ahead (stage 3).
        persistence: parameters smaller than this are never partitioned (stage 3).
        max_live: parameters that may be whole at a time (stage 3).
    """

    stage: int
    offload_optimizer: bool = False
    overlap: bool = False
    reduce_bucket: float = 5e8
    allgather_bucket: float = 5e8
    prefetch_bucket: float = 5e7
    persistence: float = 1e5
    max_live: float = 1e9


@dataclass(frozen=True)
class Cluster:
    """Devices, and a model that is trained on all of them by data parallelism.

    Attributes:
        devices: in nodes of eight.
        model: what is trained.
    """

    devices: int
    model: Transformer

    @property
    def nodes(self) -> int:
        """Nodes that the devices are in."""
        return max(1, self.devices // DEVICES_A_NODE)

    def initialized_bytes(self, zero: Zero) -> float:
        """Returns the bytes on a device when the engine has been built: ZeRO, figure 1, in mixed precision."""
        params, shards = self.model.params, self.devices
        weights = 2 * params / (shards if zero.stage == 3 else 1)
        optimizer = 0.0 if zero.offload_optimizer else 12 * params / (shards if zero.stage >= 1 else 1)
        return weights + optimizer + 1.5e9

    def step_bytes(self, zero: Zero, micro_batch: int) -> float:
        """Returns the bytes that training takes above that."""
        params = self.model.params
        gradients = 2 * params / (self.devices if zero.stage >= 2 else 1)
        if zero.offload_optimizer and zero.stage >= 2:
            gradients = 0.0  # stage 1 keeps them until the optimizer's step, wherever that is
        bucket = 2 * min(zero.reduce_bucket, params) * (2 if zero.overlap else 1)
        gathered = 0.0
        if zero.stage in (1, 2):
            gathered = 2 * min(zero.allgather_bucket, params)
        elif zero.stage == 3:
            bucket = min(bucket, 4 * params)
            gathered = 2 * min(zero.max_live + zero.prefetch_bucket, params)
        if zero.stage == 0:
            bucket = 2 * min(5e8, params)
        return gradients + bucket + gathered + micro_batch * self.model.activation_bytes

    def step_seconds(self, zero: Zero, micro_batch: int, accumulation: int) -> float:
        """Returns what an optimizer step takes."""
        params = self.model.params
        tokens = micro_batch * self.model.sequence
        efficiency = BEST_EFFICIENCY * tokens / (tokens + HALF_EFFICIENT_TOKENS)
        # Large micro-batches lose a little again: caches and the allocator.
        efficiency *= 1 - 0.04 * (1 - exp(-tokens / 65536))
        compute = self.model.flops * micro_batch / (PEAK_FLOPS * efficiency)
        forward, backward = compute / 3, 2 * compute / 3 + (compute / 3 if self.model.recompute else 0)
        reduced = self._collective(2 * params, zero.reduce_bucket if zero.stage else 5e8)
        if zero.stage <= 1:  # once a step: an all-reduce is a reduce-scatter and an all-gather
            each, once = 0.0, 2 * reduced if zero.stage == 0 else reduced
        else:
            each, once = reduced, 0.0
        if zero.stage and zero.overlap:  # the last bucket has nothing to hide behind; reduction takes from the devices
            last = self._collective(2 * min(zero.reduce_bucket, params), zero.reduce_bucket)
            room, slowed = 0.75 * backward, 0.2 * min(each + once, 0.75 * backward)
            each = max(0.0, each - room) + min(last, each) + slowed * (each > 0)
            once = max(0.0, once - room) + min(last, once) + slowed * (once > 0)
        if zero.stage in (1, 2):
            once += self._collective(2 * params, zero.allgather_bucket)
        if zero.stage == 3:
            each += self._gathers(zero, forward) + self._gathers(zero, backward)
        return accumulation * (forward + backward + each) + once + self._optimizer(zero)

    def _gathers(self, zero: Zero, beside: float) -> float:
        """Returns what of a pass over all layers is spent waiting for parameters (stage 3)."""
        params, layer = self.model.params, self.model.params / self.model.layers
        # Biases and norms: few elements, and a collective each unless they are kept.
        small = 0 if zero.persistence >= self.model.hidden * 4 else 6 * self.model.layers
        seconds = self._collective(2 * params, max(layer, 1)) + small * self._latency
        ahead = zero.prefetch_bucket / (zero.prefetch_bucket + layer)
        if zero.max_live < 2 * layer:
            ahead *= 0.5
        return seconds - min(0.9 * ahead * seconds, beside)

    def _optimizer(self, zero: Zero) -> float:
        shard = self.model.params / (self.devices if zero.stage else 1)
        if not zero.offload_optimizer:
            return 30 * shard / 1.3e12  # bytes of states read and written, over the bandwidth of the device's memory
        return shard * DEVICES_A_NODE / HOST_ADAM + 4 * shard / HOST_BANDWIDTH

    @property
    def _latency(self) -> float:
        within = min(self.devices, DEVICES_A_NODE) - 1
        return within * NODE_ALPHA + (self.nodes - 1) * NETWORK_ALPHA

    def _collective(self, size: float, bucket: float) -> float:
        """Returns the seconds to reduce-scatter or all-gather so many bytes, so many elements at a time."""
        times = max(1.0, size / (2 * bucket))
        bandwidth = NODE_BANDWIDTH if self.nodes == 1 else NETWORK_BANDWIDTH
        return times * self._latency + size * (self.devices - 1) / self.devices / bandwidth
