"""Distils a frozen teacher, in an engine of its own without an optimizer, into a student."""

import deepspeed
import torch
import torch.nn.functional as F
from toy import batches, parse_arguments, small_model

args = parse_arguments()
teacher, *_ = deepspeed.initialize(
    model=small_model(), config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
)
teacher.eval()
model = small_model()
student, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
print(f"teacher: stage {teacher.zero_optimization_stage()}, micro-batch {teacher.train_micro_batch_size_per_gpu()}")
print(f"student: stage {student.zero_optimization_stage()}", flush=True)
for inputs, _ in batches(student.train_micro_batch_size_per_gpu(), student.device):
    with torch.no_grad():
        soft = F.softmax(teacher(inputs), -1)
    student.backward(F.kl_div(F.log_softmax(student(inputs), -1), soft, reduction="batchmean"))
    student.step()
