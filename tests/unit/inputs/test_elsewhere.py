"""Schedulers, containers and other places of a training are known by what is typed."""

import shlex

import pytest

from zerotune.trial_lib.inputs.elsewhere import started_elsewhere
from zerotune.trial_lib.inputs.entrypoint import parse_entrypoint
from zerotune.trial_lib.messages.errors import InputError

STARTS = {
    "sbatch job.slurm": "sbatch",
    "/opt/slurm/bin/sbatch --array=0-3 job.slurm": "sbatch",
    "salloc -N1 --gres=gpu:8 srun python train.py": "salloc",
    "qsub -l nodes=1 job.pbs": "qsub",
    "bsub -n 8 ./run.sh": "bsub",
    "condor_submit job.sub": "condor_submit",
    "flux batch -N1 job.sh": "flux batch",
    "kubectl -n training apply -f job.yaml": "kubectl apply",
    "helm upgrade --install run ./chart": "helm upgrade",
    "sky launch -c gpu task.yaml": "sky launch",
    "docker run --gpus all image python train.py": "docker run",
    "docker --context far exec -it box torchrun train.py": "docker exec",
    "docker compose -f train.yml up": "docker compose up",
    "podman run image": "podman run",
    "nerdctl run image": "nerdctl run",
    "apptainer exec --nv torch.sif python train.py": "apptainer exec",
    "singularity run torch.sif": "singularity run",
    "enroot start torch python train.py": "enroot start",
    "ray job submit --working-dir . -- python train.py": "ray job submit",
    "modal run train.py": "modal run",
    "dstack apply -f task.yml": "dstack apply",
    "det experiment create const.yaml .": "det experiment create",
    "aws sagemaker create-training-job --training-job-name x": "aws sagemaker create-training-job",
    "gcloud ai custom-jobs create --region=x": "gcloud custom-jobs create",
    "az ml job create --file job.yml": "az ml job create",
    "ssh node-2 bash run.sh": "ssh",
    "tmux new-session -d 'bash run.sh'": "tmux new-session",
    "env X=1 Y=2 sbatch job.slurm": "sbatch",
    "X=1 nohup sbatch job.slurm": "sbatch",
    "time sbatch job.slurm": "sbatch",
    "sudo -E -u me docker run image": "docker run",
    "timeout 60 nice -n 5 qsub job": "qsub",
    "bash -c 'cd x && X=1 sbatch job.slurm'": "sbatch",
    "bash -lc 'if true; then docker run image; fi'": "docker run",
    "sudo sh -c 'echo a | at now'": "at",
    "mpirun -np 8 singularity exec --nv torch.sif python train.py": "singularity exec",
    "srun -n 8 apptainer exec torch.sif python train.py": "apptainer exec",
}


@pytest.mark.parametrize("command", STARTS)
def test_a_command_that_starts_the_training_elsewhere_is_known(command: str) -> None:
    found = started_elsewhere(shlex.split(command))
    assert found is not None
    assert found.shown == STARTS[command]


@pytest.mark.parametrize(
    "command",
    [
        "python train.py --name sbatch",
        "torchrun --nproc_per_node 2 train.py docker run",
        "srun -n 8 python train.py",
        "mpirun -np 8 python train.py",
        "mpirun --mca plm_rsh_agent ssh -np 8 python train.py",
        "env X=1 mpiexec -bootstrap ssh -n 8 python train.py",
        "bash run.sh docker run",
        "conda run -n batch python train.py",
        "make sbatch",
        "docker ps",
        "docker pull image",
        "kubectl get pods",
        "aws s3 cp s3://bucket/data .",
        "ray start --head",
        "sbatch --version",
        "bash -c 'torchrun train.py'",
        "bash -c 'an open \" quote'",
        "uv run torchrun train.py",
        "X=1",
        "",
        "./batch train.sh",
    ],
)
def test_any_other_command_is_left_to_run(command: str) -> None:
    assert started_elsewhere(shlex.split(command)) is None


@pytest.mark.parametrize(
    ("command", "is_training"),
    [
        ("docker run -d redis:7", False),
        ("docker exec db psql -c 'select 1'", False),
        ("docker compose up -d", False),
        ("docker compose up", True),
        ("docker run --gpus=all image", True),
        ("docker run -d image bash -c 'torchrun train.py'", True),
        ("ssh node-2 mkdir -p /data", False),
        ("ssh node-2 rsync --server . /data/train.py", False),
        ("ssh node-2 'cd x && python train.py'", True),
    ],
)
def test_a_container_that_serves_the_training_is_told_from_the_training(command: str, is_training: bool) -> None:
    found = started_elsewhere(shlex.split(command))
    assert found is not None
    assert found.is_training == is_training


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("sbatch job.slurm", "`zerotune tune -- srun python train.py`), and submit that job without zerotune."),
        ("salloc -N1 srun python train.py", "`salloc OPTIONS zerotune tune -- srun python train.py`"),
        ("mpirun -np 2 singularity exec a.sif python train.py", "Install ZeroTune in the image"),
        ("ssh host python train.py", "`ssh HOST 'cd FOLDER && zerotune tune -- COMMAND'`"),
        ("numactl-of-mine --cpunodebind=0 python train.py", "Activate the environment that has it"),
        ("mamba run -n x python train.py", "mamba may be a function of your shell: activate the environment"),
    ],
)
def test_the_error_says_what_to_type_instead(command: str, remedy: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_entrypoint(shlex.split(command), where="the command", shell={"PATH": "/nowhere"})
    assert remedy in refused.value.remedy
    assert ("is not found" in refused.value.what) == command.startswith(("numactl", "mamba"))
