"""`%%tfold` and `%tfold` in a shell, against a scripted engine."""

from __future__ import annotations

import subprocess
import sys

import numpy
import pytest
from scripted_client import DIED, events

from tests.patience import best
from tfmagic import protocol
from tfmagic.errors import EngineDied, EngineFailed, Interrupted, Refusal
from tfmagic.run import Run


def test_cell_shows_the_reply_once_and_binds_the_run(shell):
    assert shell.run("%%tfold -o answer --seed 3\nWhere is the kite?") is None
    assert shell.out.count("The red kite is up.") == 1
    assert "acceptance" in shell.out and "67 %" in shell.out
    assert shell["answer"] is shell["_tfold"]
    assert isinstance(shell["answer"], Run) and shell["answer"].text == "The red kite is up."
    assert shell.asked["prompt"] == ["Where is the kite?"]
    assert shell.asked["params"] == {"seed": 3}


def test_flags_reach_the_engine(shell):
    shell.run(
        "%%tfold --max-tokens 9 --temperature 0.5 --top-p .9 --top-k 5 --min-p 0.1 --seed 7 --draft off "
        '--cache off -n 2 --logprobs 3 --stop "\\n\\n" --stop END --system "Be brief." --chat a.b --new\nhello'
    )
    assert shell.asked["params"] == {
        "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "draft": "off",
        "cache": "off", "logprobs": 3, "stop": ["\n\n", "END"],
    }
    assert shell.asked["streams"] == 2 and shell.asked["system"] == "Be brief." and shell.asked["chat"] == "a.b"
    assert shell.asked["new"]


def test_zero_is_a_value_and_what_is_left_out_is_not_sent(shell):
    shell.run("%%tfold --temperature 0 --top-k 0\nhello")
    assert shell.asked["params"] == {"temperature": 0.0, "top_k": 0}


def test_several_streams_are_shown_under_headings(shell):
    shell.run("%%tfold -n 3\nhello")
    headings = [line for line in shell.out.splitlines() if line.startswith("──")]
    assert headings[:3] == ["── stream 1", "── stream 2", "── stream 3"] and len(headings) == 6
    assert shell.out.count("The red kite is up.") == 3


def test_body_is_literal_and_the_line_is_not_expanded(shell):
    shell.ip.user_ns["name"] = "x"
    shell.run('%%tfold --system "{name} $name"\n{name} costs $5 and {{{{name}} stays\n{"a": [1]}\n')
    assert shell.asked["system"] == "{name} $name"
    assert shell.asked["prompt"] == ['{name} costs $5 and {{name}} stays\n{"a": [1]}']


def test_fields_are_filled(shell):
    shell.run("n = 3; row = {'x': [1, 'two']}")
    shell.run("%%tfold\n{{n}} and {{ row['x'][1] }}, {{{n}}}")
    assert shell.asked["prompt"] == ["3 and two, {3}"]
    shell.run("%%tfold --raw\n{{n}}")
    assert shell.asked["prompt"] == ["{{n}}"]


def test_images_come_from_variables_files_and_fields_in_order(shell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cat.png").write_bytes(b"\x89PNG\r\n....")
    pixels = numpy.zeros((4, 4, 3), numpy.uint8)
    shell.ip.user_ns.update(pixels=pixels, where=str(tmp_path / "cat.png"), box={"a": pixels}, vector=numpy.arange(3))
    shell.run('%%tfold --image cat.png --image pixels --image where\nSee {{pixels}} there, {{box["a"]}}{{vector}}')
    prompt = shell.asked["prompt"]
    assert prompt[0] == ("cat.png", tmp_path.joinpath("cat.png").relative_to(tmp_path))
    assert [part[0] if isinstance(part, tuple) else part for part in prompt] == [
        "cat.png", "pixels", "cat.png", "See ", "pixels", " there, ", 'box["a"]', "[0 1 2]"
    ]
    assert prompt[1][1] is pixels and prompt[4][1] is pixels


MISUSE = {
    "--temperature -1": "%%tfold --temperature takes a number from 0 to 10, not -1",
    "--temperature nan": "%%tfold --temperature takes a number from 0 to 10, not nan",
    "--top-p 0": "%%tfold --top-p takes a number above 0 to 1, not 0",
    "--top-p 1.1": "%%tfold --top-p takes a number above 0 to 1, not 1.1",
    "--top-k -1": "%%tfold --top-k takes a whole number from 0 up, not -1",
    "--min-p 2": "%%tfold --min-p takes a number from 0 to 1, not 2",
    "--seed 1.5": "%%tfold --seed takes a whole number from 0 to 9223372036854775807, not 1.5",
    "--max-tokens 0": "%%tfold --max-tokens takes a whole number from 1 up, not 0",
    "--logprobs 21": "%%tfold --logprobs takes a whole number from 0 to 20, not 21",
    "-n 17": "%%tfold -n takes a whole number from 1 to 16, not 17",
    "-n 0": "%%tfold -n takes a whole number from 1 to 16, not 0",
    "--draft maybe": "%%tfold --draft takes on, off, copy, block or tree, not 'maybe'",
    "--view rich": "%%tfold --view takes auto, live, text or off, not 'rich'",
    "--view live": "%%tfold: the live view needs a notebook page and anywidget; use --view text here",
    "--cache no": "%%tfold --cache takes on or off, not 'no'",
    "--chat 'a b'": "%%tfold --chat takes a name of 1 to 64 letters, digits, '-', '_', '.' or ':'",
    "--new": "%%tfold --new begins a conversation anew; say which one with --chat NAME",
    "--stop ''": "%%tfold --stop takes a text that is not empty",
    "-o 1x": "%%tfold -o takes a variable name, not '1x'",
    "-o class": "%%tfold -o takes a variable name, not 'class'",
    "--sweep seed=1,x": "%%tfold --sweep seed takes a whole number from 0 to 9223372036854775807, not x",
    "--sweep stop=a": "%%tfold --sweep takes KEY=V1,V2 with a KEY of max-tokens, temperature, top-p, top-k, min-p, "
    "seed, draft, cache, not stop=a",
    "--sweep seed": "%%tfold --sweep takes KEY=V1,V2 with a KEY of max-tokens, temperature, top-p, top-k, min-p, "
    "seed, draft, cache, not seed",
    "--sweep seed=1,2 --seed 3": "%%tfold --sweep seed is given twice; give its values once",
    "--sweep seed=1 --sweep seed=2": "%%tfold --sweep seed is given twice; give its values once",
    "--sweep seed=1,2 --chat a": "%%tfold --sweep does not go with --chat; leave one of them out",
    "--sweep seed=1,2 --bg": "%%tfold --sweep does not go with --bg; leave one of them out",
    "--sweep seed=1,2,3,4,5,6,7,8,9 --sweep top-k=1,2,3,4,5,6,7,8": "%%tfold --sweep makes 72 runs; "
    "it makes at most 64",
    "--max 5": "%%tfold has no flag --max; did you mean --max-tokens?",
    "--temprature 1": "%%tfold has no flag --temprature; did you mean --temperature?",
    "--max-tokens": "%%tfold --max-tokens needs a value",
    "--bg=1": "%%tfold --bg takes no value, not '1'",
    "hello": "%%tfold does not take 'hello' here; quote a value that holds spaces, "
    "and write the prompt into the cell's body",
    '--system "open': '%%tfold: a quote is left open in: --system "open',
    "--image https://x/y.png": "%%tfold --image takes a variable or a file, not an address: https://x/y.png; "
    "download it first",
}


@pytest.mark.parametrize("flags", MISUSE)
def test_misuse_of_a_flag_is_one_line(shell, flags):
    assert shell.usage(f"%%tfold {flags}\nhello") == MISUSE[flags]
    assert shell.engine.asked == [] and shell.connected == []


def test_misuse_of_the_body_is_one_line(shell):
    shell.run("picture = 1; row = {'width': 2}")
    assert shell.usage("%%tfold\n{{pictur}}") == "%%tfold: pictur is not defined; did you mean picture?"
    assert shell.usage("%%tfold\n{{row['widht']}}") == "%%tfold: row has no ['widht']; did you mean width?"
    assert shell.usage("%%tfold\n{{row.keyz}}") == "%%tfold: row has no .keyz; did you mean keys?"
    assert "{{a|b}} is not a field" in shell.usage("%%tfold\n{{a|b}}")
    assert "{{f(1)}} is not a field" in shell.usage("%%tfold\n{{f(1)}}")
    assert shell.usage("%%tfold\n  \n") == "%%tfold: the prompt is empty; write it into the cell's body"
    shell.run("blob = b'xyz'")
    assert "blob holds bytes that are no image" in shell.usage("%%tfold\n{{blob}}")
    assert shell.engine.asked == []


def test_misuse_of_an_image_is_one_line(shell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photo.png").write_bytes(b"\x89PNG\r\n....")
    (tmp_path / "twin").write_bytes(b"\x89PNG\r\n....")
    shell.ip.user_ns.update(twin=b"\x89PNG\r\n...", picture=b"\x89PNG\r\n...", gone="nowhere.png")
    assert shell.usage("%%tfold --image twin\nx") == (
        "%%tfold --image twin is a variable and a file; write ./twin for the file"
    )
    assert shell.usage("%%tfold --image pictur\nx").endswith("no such variable or file; did you mean picture?")
    assert shell.usage("%%tfold --image foto.png\nx").endswith("no such variable or file; did you mean photo.png?")
    assert shell.usage("%%tfold --image gone\nx") == "%%tfold --image gone: there is no file nowhere.png"
    shell.run("%%tfold --image ./twin\nx")
    assert shell.result.success and shell.asked["prompt"][0][0] == "twin"


def test_a_refusal_is_two_lines_and_fails_the_cell(shell):
    shell.run("%%tfold\nrefuse this")
    assert isinstance(shell.result.error_in_exec, Refusal)
    assert "Traceback" not in shell.out + shell.err
    assert (shell.out + shell.err).strip().splitlines() == ["Refusal: The prompt is refused.", "Write another."]


def test_an_interrupt_cancels_keeps_what_was_said_and_fails_the_cell(shell):
    def interrupted(run, streams):
        yield from list(events(run))[:7]
        yield KeyboardInterrupt()

    shell.engine.script = interrupted
    shell.run("%%tfold -o partial\nhello")
    assert isinstance(shell.result.error_in_exec, Interrupted)
    assert shell.engine.handles[0].cancelled
    assert shell["partial"].status == "stopped" and shell["partial"].text == "The red kite is up"
    assert "stopped · scripted · cpu" in shell.out and "Traceback" not in shell.out + shell.err
    assert "was stopped after 5 tokens" in shell.out + shell.err
    shell.engine.script = events
    shell.run("%%tfold\nagain")
    assert shell.result.success


def test_an_interrupt_of_a_run_that_is_not_shown(shell):
    shell.engine.script = lambda run, streams: iter([KeyboardInterrupt()])
    shell.run("%%tfold --view off\nhello")
    assert isinstance(shell.result.error_in_exec, Interrupted)
    assert shell["_tfold"].status == "stopped" and "stopped · " not in shell.out


def test_an_interrupt_before_the_run_begins(shell, monkeypatch):
    def submit(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(shell.engine, "submit", submit)
    shell.run("%%tfold\nhello")
    assert isinstance(shell.result.error_in_exec, Interrupted) and "Traceback" not in shell.out + shell.err


def test_the_engine_dies_and_the_next_cell_gets_a_fresh_one(shell):
    def dies(run, streams):
        yield from list(events(run))[:6]
        yield DIED

    shell.engine.script = dies
    shell.run("%%tfold -o partial\nhello")
    assert isinstance(shell.result.error_in_exec, EngineDied)
    assert shell["partial"].status == "failed" and shell["partial"].text == "The red kite is"
    assert "failed · scripted" in shell.out and "Traceback" not in shell.out + shell.err
    shell.engine.alive, shell.engine.script = False, events
    connections = len(shell.connected)
    shell.run("%%tfold\nagain")
    assert len(shell.connected) == connections + 1


def test_a_failed_run_fails_the_cell_and_is_kept(shell):
    def fails(run, streams):
        yield protocol.Done(run, "failed", 3.0, "The numbers ran out.\nBuy more.")

    shell.engine.script = fails
    shell.run("%%tfold -o broken\nhello")
    assert isinstance(shell.result.error_in_exec, EngineFailed)
    assert shell["broken"].error == "The numbers ran out.\nBuy more."
    assert (shell.out + shell.err).strip().splitlines()[-2:] == ["EngineFailed: The numbers ran out.", "Buy more."]


def test_background_returns_a_handle_at_once(shell):
    handle = shell.run("%%tfold --bg -o later\nhello")
    assert handle is shell.engine.handles[0] and not handle.record.finished
    assert shell["later"] is handle.record
    while not handle.wait(0):
        pass
    assert shell["later"].text == "The red kite is up."


def test_view_off_shows_nothing(shell):
    shell.run("%%tfold --view off\nhello")
    assert shell.out == "" and shell["_tfold"].status == "done"
    shell.run("%config TfoldMagics.view = 'off'")
    shell.run("%%tfold\nhello")
    assert shell.out == ""
    shell.run("%%tfold --view text\nhello")
    assert "The red kite is up." in shell.out


def test_view_comes_from_the_environment(ip, monkeypatch):
    monkeypatch.setenv("TFMAGIC_VIEW", "off")
    ip.run_line_magic("load_ext", "tfmagic")
    assert ip.magics_manager.registry["TfoldMagics"].view == "off"
    ip.run_line_magic("unload_ext", "tfmagic")


def test_a_sweep_runs_every_combination_and_compares_the_replies(shell):
    assert shell.run("%%tfold --sweep draft=on,off --sweep max-tokens=3,4 -o table\nhello") is None
    asked = [(run["params"]["draft"], run["params"]["max_tokens"]) for run in shell.engine.asked]
    assert asked == [("on", 3), ("on", 4), ("off", 3), ("off", 4)]
    assert shell["table"] is shell["_tfold"] and [run.status for run in shell["table"]] == ["done"] * 4
    assert "4 runs, the same tokens." in shell.out and shell.out.count("The red kite is up.") == 4
    assert shell.out.splitlines()[-7].split()[:3] == ["draft", "max_tokens", "status"]
    shell["table"][0].streams[0].tokens.pop()
    assert "4 runs, 2 different replies." in str(shell["table"])


def test_an_interrupted_sweep_keeps_what_was_finished(shell):
    scripts = [events, lambda run, streams: iter([KeyboardInterrupt()])]
    shell.engine.script = lambda run, streams: scripts.pop(0)(run, streams)
    shell.run("%%tfold --sweep seed=1,2,3 -o table\nhello")
    assert isinstance(shell.result.error_in_exec, Interrupted)
    assert [run.status for run in shell["table"]] == ["done", "stopped"]
    assert "stopped" in shell.out and "Traceback" not in shell.out + shell.err


# %tfold --------------------------------------------------------------------------------------------


def test_status_tells_the_engine_or_that_none_runs(shell):
    text = str(shell.run("%tfold status"))
    assert "ready" in text and "4321" in text and "scripted" in text and "4.0 KiB of 1.0 GiB" in text
    shell.running = False
    assert str(shell.run("%tfold")) == "No engine is running. %tfold start starts one; so does %%tfold."


def test_start_and_restart_pass_their_flags_on(shell, monkeypatch):
    shell.run("%tfold start some/model --device cuda:1 --prompt-cache-gib 2 --context 4096 --idle-minutes 0")
    options = {"prompt_cache_gib": 2.0, "context": 4096, "idle_minutes": 0.0}
    assert shell.connected[-1] == (("some/model", "cuda:1"), options)
    assert "ready: scripted on cpu, process 4321" in shell.out
    shell.run("%tfold restart --context 512 --no-learn-conversations")
    asked = {"context": 512, "learn_conversations": False, "restart": True}
    assert shell.connected[-1] == ((None, "auto"), asked)
    shell.run("%tfold start --learn-conversations --spill-gib 2 --learn-dir ~/states --learn-daily-gib 0")
    asked = {"learn_conversations": True, "spill_gib": 2.0, "learn_dir": "~/states", "learn_daily_gib": 0.0}
    assert shell.connected[-1] == ((None, "auto"), asked)


def test_cache_shows_what_is_kept_where_and_clears_it(shell):
    text = str(shell.run("%tfold cache"))
    assert text.splitlines()[0].split() == ["where", "what", "size", "kept", "whose"]
    assert "2 states" in text and "/states · 2 read" in text and "128 rows" in text and "chat “sea”, turn 1" in text
    assert "1 state, the last 0 of them here" not in text and "3 states, the last 1 of them here" in text
    assert "0 states" in str(shell.run("%tfold cache clear"))
    assert shell.usage("%tfold cache drop").startswith("%tfold cache WHAT takes clear, not 'drop'")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("begin", "%tfold has no begin; it has start, status"),
        ("statsu", "%tfold has no statsu; did you mean status"),
        ("start a b", "%tfold start does not take 'b' here"),
        ("start --device gpu", "%tfold start --device takes auto, cpu or cuda:N, not 'gpu'"),
        ("start --kv-cache fp16", "%tfold start --kv-cache takes bf16 or fp8, not 'fp16'"),
        ("start --drafter ''", "%tfold start --drafter takes a folder, a Hugging Face id or none"),
        ("start --drafter-bits 8", "%tfold start --drafter-bits takes 4 or 16, not '8'"),
        ("start --learn-conversations=x", "%tfold start --learn-conversations/--no-learn-conversations takes no value"),
        ("start --spill-gib -1", "%tfold start --spill-gib takes a number from 0 up, not -1"),
        ("start --context 3", "%tfold start --context takes a whole number from 64 up, not 3"),
        ("profile", "%tfold profile is not there yet in this version"),
        ("show", "%tfold show needs ID"),
        ("show zzz", "%tfold: the engine keeps no run zzz; see %tfold runs"),
        ("last --live", "%tfold --live needs a notebook page and anywidget; leave it out here"),
        ("status now", "%tfold status does not take 'now' here"),
    ],
)
def test_misuse_of_a_command_is_one_line(shell, line, message):
    assert shell.usage(f"%tfold {line}").startswith(message)


def test_start_takes_what_is_there(shell):
    shell.run("%tfold start --drafter none --drafter-bits 4 --kv-cache fp8")
    options = {"drafter": "none", "drafter_bits": 4, "kv_cache": "fp8"}
    assert shell.result.success and shell.connected == [((None, "auto"), options)]


def test_runs_show_and_last(shell):
    shell.run("%%tfold --chat sea\nfirst")
    shell.run("%%tfold\nsecond")
    listed = shell.run("r = %tfold runs\nr")
    assert [run.id for run in listed] == ["run1abc", "run0abc"] and "sea, turn 1" in str(listed)
    assert shell.run("%tfold last").prompt == "second"
    assert shell.run("%tfold show run0").prompt == "first"
    assert shell["_tfold"].prompt == "first"
    assert "begins the ids of several runs: run1abc, run0abc" in shell.usage("%tfold show run")


def test_a_semicolon_silences_a_line(shell):
    shell.run("%%tfold\nfirst")
    assert shell.run("%tfold last;") is None and shell.result.success and shell.out == ""
    assert shell["_tfold"].prompt == "first"


def test_last_shows_a_run_that_still_goes_on(shell):
    shell.run("%%tfold --bg\nhello")
    assert shell.run("%tfold last") is None
    assert "The red kite is up." in shell.out and shell["_tfold"].status == "done"


def test_interrupting_last_does_not_stop_the_run(shell):
    shell.engine.script = lambda run, streams: iter([KeyboardInterrupt()])
    shell.run("%%tfold --bg\nhello")
    shell.run("%tfold last")
    assert isinstance(shell.result.error_in_exec, Interrupted) and not shell.engine.handles[0].cancelled


def test_cancel_and_stop(shell):
    shell.run("%%tfold --bg\nhello")
    shell.run("%tfold cancel run0")
    shell.run("%tfold cancel")
    assert shell.engine.cancelled == ["run0abc", None]
    shell.run("%tfold stop")
    assert shell.engine.stopped and shell.out == "The engine was stopped.\n"
    shell.running = False
    shell.run("%tfold stop")
    assert shell.out == "No engine is running.\n"


def test_models_lists_the_embedded_and_the_cached(shell, tmp_path, monkeypatch):
    import huggingface_hub.constants

    for name, kind in (("tiny", "qwen3_5"), ("other", "llama")):
        snapshot = tmp_path / f"models--some--{name}" / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(f'{{"model_type": "{kind}"}}')
        refs = snapshot.parent.parent / "refs"
        refs.mkdir()
        (refs / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path), raising=False)
    assert [model.name for model in shell.run("%tfold models")] == ["embedded", "some/tiny"]


# The extension -------------------------------------------------------------------------------------


def test_help_is_grouped_and_has_examples(shell):
    shell.run("%%tfold?")
    shell.run("%tfold?")
    cell, line = shell.ip.magics_manager.magics["cell"]["tfold"], shell.ip.magics_manager.magics["line"]["tfold"]
    for words in ("prompt:", "sampling", "engine:", "notebook:", "examples", "--temperature T", "{{df.shape}}"):
        assert words in cell.__doc__
    for words in ("%tfold status", "%tfold restart", "--device auto|cpu|cuda:N", "%tfold last"):
        assert words in line.__doc__


def test_loading_twice_and_reloading_leave_one_of_everything(shell):
    once = shell.registered()
    shell.run("%load_ext tfmagic")
    from tfmagic import load_ipython_extension

    load_ipython_extension(shell.ip)
    now = shell.registered()
    assert now["configurables"] == once["configurables"] and now["matchers"] == once["matchers"]
    for _ in range(3):
        shell.run("%reload_ext tfmagic")
        assert shell.result.success and shell.out == ""
    now = shell.registered()
    assert len(now["configurables"]) == len(once["configurables"]) and len(now["matchers"]) == len(once["matchers"])
    shell.run("%%tfold\nhello")
    assert "The red kite is up." in shell.out


def test_unloading_leaves_the_engine_and_the_results(shell):
    shell.run("%%tfold\nhello")
    shell.run("%unload_ext tfmagic")
    assert not shell.engine.stopped
    assert shell["_tfold"].text == "The red kite is up."
    assert "not found" in shell.usage("%tfold status")
    shell.run("%load_ext tfmagic")


def test_the_public_face_is_small_and_lazy():
    import tfmagic
    from tfmagic.client import connect

    assert tfmagic.connect is connect and tfmagic.Run is Run
    assert set(tfmagic.__all__) == {
        "Run", "__version__", "connect", "load_ipython_extension", "unload_ipython_extension"
    }
    with pytest.raises(AttributeError, match="has no attribute 'conect'"):
        tfmagic.conect  # noqa: B018


LOADING = """
import sys, time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
before = set(sys.modules)

def spent(work):
    start = time.process_time()  # of the processor, so that a busy machine does not matter
    work()
    return 1e3 * (time.process_time() - start)

slow = max(1, spent(lambda: sum(i * i % 7 for i in range(250_000))) / 20)  # as a slow one does not
took = spent(lambda: shell.run_line_magic("load_ext", "tfmagic")) / slow
heavy = {"torch", "ipywidgets", "anywidget", "PIL", "zmq", "numpy", "pandas", "huggingface_hub", "transformers"}
print(took, sorted(heavy & (set(sys.modules) - before)))
"""


def test_loading_is_light():
    def milliseconds() -> float:
        loading = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, check=True)
        took, heavy = loading.stdout.split(" ", 1)
        assert heavy.strip() == "[]"
        return float(took)

    best(milliseconds, 50)
