"""A trial leaves the user's files as they are: checkpoints go elsewhere, and what was there before is not changed."""

import textwrap

import pytest
from case_fixtures import quick_only
from conftest import PROGRAMS

from zerotune.trial_lib.messages.orders import StepWindow

# By both ways: a layer has to hold what is promised of Python's functions, and the interception is what most have to do
# without.
pytestmark = pytest.mark.parametrize(
    "way_of_files", [pytest.param("layered", marks=pytest.mark.long), "intercepted"], indirect=True
)

SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)

TRAIN = """
import json, os, shutil, sys, time
from pathlib import Path
import deepspeed, numpy, torch
from toy import parse_arguments, small_model, train

args = parse_arguments()
model = small_model()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
{preparation}
train(engine, 1)
{body}
train(engine, 1000)
"""


def snapshot(folder):
    """Returns what stands in a folder: the content of each file, and when something about it changed."""
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else None, path.lstat().st_ctime_ns)
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts and path.suffix != ".py"
    }


@pytest.fixture
def program(tmp_path):
    """The user's folder, with files that were there before the study."""
    folder = tmp_path / "program"
    (folder / "out" / "deep").mkdir(parents=True)
    (folder / "empty").mkdir()
    for name in ("best.pt", "log.txt", "state.json", "out/deep/model.bin", "out/note.txt"):
        (folder / name).write_text(f"the user's {name}")
    (folder / "latest").symlink_to("best.pt")
    return folder


@pytest.fixture
def run(trials, program, way_of_files):
    """Runs a program that does something between its steps, or before, and returns what it has printed."""

    def run(body="", preparation="", **options):
        (program / "train.py").write_text(TRAIN.format(body=textwrap.dedent(body), preparation=preparation))
        (program / "toy.py").write_text((PROGRAMS / "toy.py").read_text())
        result = trials.run("train.py", model_dir=program, window=SHORT, **options)
        assert result.outcome == "completed", (result.reason, trials.log(result))
        assert result.files == way_of_files
        assert not (trials.root / "0000" / "scratch").exists()
        return trials.log(result)

    return run


SAVES = {
    "engine": "assert engine.save_checkpoint('checkpoints') and engine.save_16bit_model('checkpoints')",
    "torch": "torch.save(model.state_dict(), 'best.pt'); torch.save({}, Path('out') / 'last.pt'); "
    "assert 'best.pt' in os.listdir() and len(torch.load('best.pt')) == 4; os.remove('best.pt')",
    "torch, then renamed": "torch.save({'epoch': 3}, 'best.pt.new'); os.replace('best.pt.new', 'best.pt'); "
    "assert torch.load('best.pt')['epoch'] == 3 and os.path.getsize('best.pt') > 100",
    "torch, to an open file": "torch.save({'epoch': 3}, open('best.pt', 'wb')); torch.load(open('best.pt', 'rb'))",
    "safetensors": "import safetensors.torch as st; st.save_file({'a': torch.ones(2)}, 'new.safetensors'); "
    "assert st.load_file('new.safetensors')['a'].sum() == 2; st.save_model(small_model(), 'out/deep/model.bin')",
    "distributed": "import torch.distributed.checkpoint as dcp; state = {'a': torch.ones(2)}; "
    "dcp.save(state, checkpoint_id='dcp'); dcp.save(state, storage_writer=dcp.FileSystemWriter('out')); "
    "state = {'a': torch.zeros(2)}; dcp.load(state, checkpoint_id='dcp'); assert state['a'].sum() == 2",
}


@pytest.mark.parametrize("save", SAVES)
def test_a_trial_leaves_the_users_checkpoints_alone(run, program, save):
    before = snapshot(program)
    run(SAVES[save], slots=2 if save == "distributed" else 1)
    assert snapshot(program) == before


CHANGES = {
    "open": "open('log.txt', 'w').write('new'); assert open('log.txt').read() == 'new'",
    "append": "open('log.txt', 'a').write('!'); assert open('log.txt').read() == \"the user's log.txt!\"",
    "pathlib": "Path('log.txt').write_text('new'); assert Path('log.txt').read_text() == 'new'",
    "another folder": "os.chdir('out'); open('../log.txt', 'w').write('new'); "
    "assert open('../log.txt').read() == 'new'; os.chdir('..')",
    "descriptor": "os.write(os.open('log.txt', os.O_WRONLY | os.O_TRUNC), b'new'); "
    "assert open('log.txt').read() == 'new'",
    "truncate": "os.truncate('log.txt', 3); assert open('log.txt').read() == 'the'",
    "numpy": "numpy.save(open('state.json', 'wb'), numpy.ones(3)); assert numpy.load('state.json').sum() == 3",
    "logging": "import logging; logging.basicConfig(filename='log.txt', force=True); logging.error('words'); "
    "assert 'words' in open('log.txt').read()",
    "remove": "os.remove('log.txt'); os.unlink('best.pt'); Path('state.json').unlink(); "
    "assert not os.path.exists('log.txt') and not Path('best.pt').exists()",
    "written anew": "os.remove('log.txt'); open('log.txt', 'x').write('new'); assert open('log.txt').read() == 'new'",
    "rename": "os.rename('log.txt', 'log.txt.1'); open('log.txt', 'w').write('new')",
    "replace": "Path('out/note.txt').replace('out/old.txt'); os.rename('out', 'elsewhere')",
    "overwritten by a new file": "open('new', 'w').write('new'); os.replace('new', 'state.json'); "
    "assert Path('state.json').read_text() == 'new'",
    "move": "shutil.move('best.pt', 'out'); shutil.copy('state.json', 'log.txt')",
    "folder": "shutil.rmtree('out'); assert not os.path.exists('out'); os.makedirs('out'); os.rmdir('empty')",
    "folder, and its folders": "shutil.rmtree('out'); Path('out/deep').mkdir(parents=True)",
    "link": "os.unlink('latest'); os.symlink('other.pt', 'latest')",
    "a new file over a checkpoint": "torch.save({'epoch': 1}, 'new.pt'); "
    "torch.save({'epoch': 2}, open('aside', 'wb')); "
    "os.replace('aside', 'new.pt'); assert torch.load('new.pt')['epoch'] == 2",
    "hard link": "os.link('log.txt', 'other.txt'); Path('other.txt').write_text('new'); os.remove('other.txt')",
    "a name in a class": "class Files:\n    opener, remove = open, os.remove\n"
    "Files().opener('log.txt', 'w').write('new'); Files().remove('best.pt')",
    "times": "os.utime('log.txt'); os.chmod('state.json', 0o600); Path('best.pt').touch()",
}


QUICK = ("open", "append", "remove", "rename", "replace", "folder", "link", "a name in a class")


@pytest.mark.parametrize("change", quick_only(QUICK, CHANGES))
def test_a_file_that_was_there_before_the_study_is_never_changed(run, program, change):
    before = snapshot(program)
    run(CHANGES[change])
    assert snapshot(program) == before


def test_what_one_rank_writes_the_others_read(run, program):
    body = """
    if torch.distributed.get_rank() == 0:
        Path("state.json").write_text("for all")
        torch.save({"for": "all"}, "best.pt")
    torch.distributed.barrier()
    assert Path("state.json").read_text() == "for all"
    assert torch.load("best.pt") == {"for": "all"}
    """
    before = snapshot(program)
    run(body, slots=2)
    assert snapshot(program) == before


def test_a_new_file_stays_for_the_next_trial(run, program):
    run(
        preparation="Path('cache').mkdir(); Path('cache/tokens.json').write_text('[1]'); "
        "numpy.save('cache/tokens', numpy.ones(2))"
    )
    assert (program / "cache" / "tokens.json").read_text() == "[1]"
    assert (program / "cache" / "tokens.npy").exists()


def test_caches_and_temporary_files_are_written_as_ever(run, program, tmp_path, monkeypatch):
    cache = tmp_path / "caches" / "hf"
    cache.mkdir(parents=True)
    (cache / "index.json").write_text("old")
    monkeypatch.setenv("HF_HOME", str(cache))
    run(
        f"Path('{cache}/index.json').write_text('new'); torch.save({{}}, '{tmp_path}/here.pt'); "
        "import tempfile; tempfile.NamedTemporaryFile('w').write('x'); shutil.rmtree(tempfile.mkdtemp())"
    )
    assert (cache / "index.json").read_text() == "new"
    assert (tmp_path / "here.pt").exists()


def test_a_file_that_is_read_costs_hardly_more(run):
    body = """
    from zerotune.trial_lib.rank import user_files
    Path("log.txt").write_text("copied")
    def seconds(open_):
        started = time.perf_counter()
        for _ in range(2000):
            open_("state.json").close()
        return time.perf_counter() - started
    pairs = [(seconds(open), seconds(user_files._real_open)) for _ in range(5)]
    print("more", min(ours / plain for ours, plain in pairs), min(ours for ours, _ in pairs) / 2000)
    """
    log = run(body)
    assert float(log.split("more ")[1].split()[0]) < 2.5


def test_a_folder_that_is_emptied_and_made_again_can_be_written_and_read(run, program):
    before = snapshot(program)
    body = """
        shutil.rmtree("out")
        os.makedirs("out")
        print("emptied:", not os.path.exists("out/note.txt"), os.path.isdir("out"))
        Path("out/index.json").write_text("[1]")
        Path("out/note.txt").write_text("another note")
        print("read:", json.load(open("out/index.json")), Path("out/note.txt").read_text())
        """
    said = run(body)
    assert "emptied: True True" in said
    assert "read: [1] another note" in said
    after = snapshot(program)
    assert after["out/note.txt"] == before["out/note.txt"]
    assert after["out/deep/model.bin"] == before["out/deep/model.bin"]


def test_a_file_that_is_not_there_is_not_created_by_opening_it(run, tmp_path):
    body = """
        try:
            os.open("/tmp/zerotune-no-such-file", os.O_RDWR)
        except FileNotFoundError:
            print("as it should be")
        """
    assert "as it should be" in run(body)
