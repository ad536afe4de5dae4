"""The deployments: the forms of their flows, and their job templates as the real workers render them."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import jsonschema
import pytest
import yaml
from kubernetes_asyncio.client import ApiClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ParameterTypeError
from prefect.flows import load_flow_from_entrypoint
from prefect.runner._workspace_resolver import prepare_workspace
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import validate
from prefect.workers.process import ProcessWorker
from prefect_docker.worker import DockerWorker
from prefect_kubernetes import KubernetesWorker

from zerotune.flows.plan import plan
from zerotune.flows.tune import experiment, tune
from zerotune.trial_lib.records.result import SEARCH_METRICS
from zerotune.trial_lib.search.methods import METHODS
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.full_experiment import TrainingArguments

if TYPE_CHECKING:
    from zerotune.flows.prefect_server import PrefectServer

DEPLOYMENTS = Path(__file__).parents[2] / "deployments"
PREFECT_FILE = yaml.safe_load((DEPLOYMENTS / "prefect.yaml").read_text())
WORKERS: dict[str, Any] = {"process": ProcessWorker, "docker": DockerWorker, "kubernetes": KubernetesWorker}
POOLS = {"zerotune": "process", "zerotune-docker": "docker", "zerotune-kubernetes": "kubernetes"}


def template(kind: str) -> dict[str, Any]:
    text: dict[str, Any] = json.loads((DEPLOYMENTS / "work_pools" / f"{kind}.json").read_text())
    return text


def rendered(kind: str, **values: Any) -> Any:
    """Returns what the worker hands to its infrastructure: the template with these job variables, for one flow run."""

    async def render() -> Any:
        # Not on loopback: a container would be given another address of it, and the daemon asked which.
        with temporary_settings({PREFECT_API_URL: "http://prefect.example:4200/api"}):
            configuration = await WORKERS[kind].job_configuration.from_template_and_values(
                template(kind), values, client=get_client()
            )
            state = State(type=StateType.PENDING)
            configuration.prepare_for_flow_run(FlowRun(flow_id=uuid4(), name="able-owl", state=state))
            return configuration

    return asyncio.run(render())


@pytest.mark.parametrize(
    ("flow", "record", "own"),
    [
        (tune, StudyArguments, ["work_dir", "study_dir"]),
        (experiment, TrainingArguments, ["work_dir", "experiment_dir"]),
    ],
)
def test_the_form_of_a_flow_shows_every_parameter_with_its_description_and_default(
    flow: Any, record: Any, own: list[str]
) -> None:
    form = parameter_schema(flow).model_dump_for_openapi()
    assert list(form["properties"]) == [*record.model_fields, *own]
    assert [field for field in form["properties"].values() if not field.get("description")] == []
    # Nothing is required by itself: a study to resume needs nothing else.
    assert "required" not in form
    plain = {name: field for name, field in record.model_fields.items() if not field.is_required()}
    of_record = record.model_json_schema()["properties"]
    for name in plain.keys() - {"zero_stages"}:
        assert form["properties"][name].get("default") == of_record[name].get(
            "default", plain[name].get_default(call_default_factory=True)
        ), name


def test_the_form_offers_the_choices_and_keeps_the_limits() -> None:
    fields = parameter_schema(tune).properties
    assert fields["method"]["enum"] == list(METHODS)
    assert fields["metric"]["enum"] == list(SEARCH_METRICS)
    assert fields["start"]["enum"] == ["warm", "cold"]
    assert fields["zero_stages"]["items"]["enum"] == [0, 1, 2, 3]
    assert fields["free_batch"]["type"] == "boolean"
    assert fields["max_trials"]["exclusiveMinimum"] == 0
    assert fields["memory_headroom"]["exclusiveMaximum"] == 1


def test_the_form_has_no_switch_called_none() -> None:
    for flow in (tune, experiment, plan):
        for name, field in parameter_schema(flow).properties.items():
            assert "anyOf" not in field, name
            # The form sends a default, and Prefect refuses a null for a text.
            assert field.get("default", "") is not None, name
            assert field.get("type") or field.get("enum") or field.get("$ref"), name


def test_a_deployments_parameters_are_checked_by_the_form_and_by_the_run(tmp_path: Path) -> None:
    form = parameter_schema(tune).model_dump_for_openapi()
    given = {"start": "cold", "work_dir": str(tmp_path)}
    # Prefect checks parameters twice: when a run is created, by the form's schema, and when it begins.
    assert validate(given, form) == []
    assert tune.validate_parameters(given)["start"] == "cold"
    with pytest.raises(ParameterTypeError):
        tune.validate_parameters({**given, "start": "tepid"})


def test_each_deployment_is_of_a_flow_that_the_package_has_and_gives_parameters_that_it_knows() -> None:
    names = set()
    for deployment in PREFECT_FILE["deployments"]:
        flow = load_flow_from_entrypoint(deployment["entrypoint"])
        names.add(f"{flow.name}/{deployment['name']}")
        properties = parameter_schema(flow).properties
        assert deployment["parameters"].keys() <= properties.keys()
        assert "work_dir" in deployment["parameters"]
        assert POOLS[deployment["work_pool"]["name"]]
    assert names == {
        *("tune/local", "tune/nightly", "tune/docker", "tune/kubernetes"),
        "plan/local",
        *("experiment/local", "experiment/docker", "experiment/kubernetes"),
    }


@pytest.mark.parametrize("kind", WORKERS)
def test_a_job_template_fits_its_own_schema_and_leaves_out_nothing_that_the_worker_knows(kind: str) -> None:
    ours, theirs = template(kind), WORKERS[kind].get_default_base_job_template()
    variables = ours["variables"]
    jsonschema.Draft202012Validator.check_schema(variables)
    defaults = {name: field["default"] for name, field in variables["properties"].items() if "default" in field}
    jsonschema.Draft202012Validator(variables).validate(defaults)
    assert theirs["job_configuration"].keys() == ours["job_configuration"].keys()
    # The one that is spelled out in parts: GPUs and shared memory.
    assert theirs["variables"]["properties"].keys() - variables["properties"].keys() <= {"container_create_kwargs"}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(variables).validate({**defaults, "stream_output": "perhaps"})


def test_the_process_worker_runs_a_flow_in_an_empty_folder_with_a_heartbeat() -> None:
    configuration = rendered("process")
    assert configuration.env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    assert configuration.env["PREFECT_API_URL"] == "http://prefect.example:4200/api"
    assert configuration.working_dir is None
    assert configuration.command.endswith("-m prefect.engine")


def test_the_docker_worker_asks_for_gpus_shared_memory_and_volumes() -> None:
    from docker.models.containers import _create_container_args

    worker = DockerWorker(work_pool_name="zerotune-docker")
    # docker-py's own check of what would be sent to the daemon.
    sent = _create_container_args({**worker._build_container_settings(None, rendered("docker")), "version": "1.44"})
    host = sent["host_config"]
    assert sent["image"] == "zerotune:latest"
    assert host["DeviceRequests"] == [
        {"Driver": "nvidia", "Count": -1, "DeviceIDs": [], "Capabilities": [["gpu"]], "Options": {}}
    ]
    assert host["ShmSize"] == 16 * 1024**3
    assert host["Binds"] == ["/srv/zerotune:/zerotune", "zerotune-torch-extensions:/opt/torch_extensions"]
    assert sent["environment"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    assert sent["command"] == "prefect flow-run execute"

    on_a_cpu = rendered("docker", device_requests=[], shm_size="2g", volumes=["/data:/zerotune:ro"])
    host = _create_container_args({**worker._build_container_settings(None, on_a_cpu), "version": "1.44"})[
        "host_config"
    ]
    assert not host.get("DeviceRequests")
    assert host["ShmSize"] == 2 * 1024**3
    assert host["Binds"] == ["/data:/zerotune:ro"]


def test_the_kubernetes_worker_asks_for_gpus_shared_memory_and_a_volume() -> None:
    job = rendered("kubernetes", gpus=4, memory_request="64Gi").job_manifest
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "zerotune:latest"
    assert container["workingDir"] == image_folder()
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}, "requests": {"memory": "64Gi"}}
    assert {"name": "PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "value": "30"} in container["env"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"work": "/zerotune", "shared-memory": "/dev/shm"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["work"]["persistentVolumeClaim"] == {"claimName": "zerotune-work"}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    # A quantity may be a number; the client's own are text.
    container["resources"]["limits"]["nvidia.com/gpu"] = "4"
    assert known_to_kubernetes(job) == job


def image_folder() -> str:
    """The folder that a container of the image begins in."""
    (folder,) = re.findall(r"^WORKDIR (.+)$", (DEPLOYMENTS / "Dockerfile").read_text(), re.MULTILINE)
    return str(folder)


def test_a_container_s_run_takes_no_copy_of_the_volume_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume, begun_in, workspace = tmp_path / "zerotune", tmp_path / image_folder()[1:], tmp_path / "workspace"
    volume.mkdir()
    (volume / "tokens.bin").touch()
    begun_in.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(begun_in)
    run = FlowRun(flow_id=uuid4(), name="able-owl", state=State(type=StateType.PENDING))
    deployment = DeploymentResponse(
        name="docker", flow_id=run.flow_id, entrypoint="zerotune.flows.tune.tune", pull_steps=[]
    )
    # What `prefect flow-run execute` does first; without storage of the deployment's it asks no server.
    with temporary_settings(
        {PREFECT_API_URL: "http://prefect.example:4200/api", PREFECT_LOGGING_TO_API_ENABLED: False}
    ):
        asyncio.run(prepare_workspace(get_client(), run, deployment, workspace))
    assert list(workspace.iterdir()) == []


def known_to_kubernetes(job: dict[str, Any]) -> Any:
    """Returns what Kubernetes' own client makes of a job: it drops what its API has no field for."""

    class Response:
        data = json.dumps(job)

    async def through_the_client() -> Any:
        async with ApiClient() as client:
            return client.sanitize_for_serialization(client.deserialize(Response(), "V1Job"))

    understood = asyncio.run(through_the_client())
    # Prefect's own template has these two in the pod, where Kubernetes ignores them.
    ignored = {name: job["spec"]["template"]["spec"][name] for name in ("completions", "parallelism")}
    understood["spec"]["template"]["spec"].update(ignored)
    return understood


@pytest.mark.long
def test_a_prefect_server_takes_the_deployments_as_they_stand(server: "PrefectServer", tmp_path: Path) -> None:
    with temporary_settings({PREFECT_API_URL: server.api_url}), get_client(sync_client=True) as client:
        for name, kind in POOLS.items():
            client.create_work_pool(WorkPoolCreate(name=name, type=kind, base_job_template=template(kind)))
        deployed = subprocess.run(
            [
                *(sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"),
                *("--prefect-file", str(DEPLOYMENTS / "prefect.yaml")),
            ],
            cwd=tmp_path,
            env={**os.environ, "PREFECT_API_URL": server.api_url, "PWD": str(tmp_path)},
            text=True,
            capture_output=True,
        )
        assert deployed.returncode == 0, deployed.stdout + deployed.stderr
        nightly = client.read_deployment_by_name("tune/nightly")
        assert [(schedule.schedule.cron, schedule.active) for schedule in nightly.schedules] == [("0 2 * * *", False)]
        assert nightly.parameters["work_dir"] == str(tmp_path)
        in_a_pod = client.read_deployment_by_name("tune/kubernetes")
        assert in_a_pod.parameters == {"work_dir": "/zerotune"}
        assert in_a_pod.pull_steps == []
        for described in yaml.safe_load((DEPLOYMENTS / "automations.yaml").read_text())["automations"]:
            client.create_automation(AutomationCore.model_validate(described))
