"""The package as a user gets it: the wheel and the editable install, with everything inside and nothing in the way."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, "-m", "tfmagic.cli"]
LOOK = """
import importlib, json, sys
from pathlib import Path
import tfmagic
names = ["run", "protocol", "client", "cli", "magics", "views.card", "views.live", "engine.loop", "engine.resident",
         "engine.families.qwen3_5", "kernels.linear"]
for name in names:
    importlib.import_module("tfmagic." + name)
home = Path(tfmagic.__file__).parent
data = ["views/live.js", "notebooks/01_quickstart.ipynb", "engine/embedded/model/tokenizer.json",
        "engine/embedded/model/chat_template.jinja", "engine/embedded/model/config.json", "py.typed"]
print(json.dumps({"home": str(home), "missing": [d for d in data if not (home / d).is_file()],
                  "weights": sum(f.stat().st_size for f in (home / "engine/embedded/model").glob("*.safetensors")),
                  "shadow": [n for n in ("kernels", "engine") if importlib.util.find_spec(n)]}))
"""


def look(path: Path | None, cwd: Path) -> dict:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(cwd)} | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run([sys.executable, "-c", LOOK], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_wheel_holds_everything_and_claims_one_name(tmp_path):
    subprocess.run([sys.executable, "-m", "build", "--wheel", "-o", str(tmp_path / "dist"), str(ROOT)], check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    top = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"tfmagic"}
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True)
    seen = look(site, tmp_path)
    assert Path(seen["home"]) == site / "tfmagic"
    assert seen["missing"] == [] and 1e7 < seen["weights"] < 40e6
    demo(site, tmp_path / "work")


def demo(site: Path, cwd: Path) -> None:
    """`tfmagic demo` of an installed package leaves its results where the user stands."""
    cwd.mkdir()
    runtime = tempfile.mkdtemp(prefix="tfm-")
    env = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "PYTHONPATH": str(site), "TFMAGIC_RUNTIME_DIR": runtime}
    try:
        done = subprocess.run([*CLI, "demo"], cwd=cwd, env=env, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0 and "The star is green." in done.stdout, done.stdout + done.stderr
    finally:
        subprocess.run([*CLI, "stop", "--all"], cwd=cwd, env=env, capture_output=True, timeout=120)
        shutil.rmtree(runtime, ignore_errors=True)
    left = {path.name for path in cwd.iterdir()}
    assert {"01_quickstart.executed.ipynb", "01_quickstart.executed.html", "scene.png"} <= left


def test_the_editable_install_works_from_anywhere_and_shadows_nothing(tmp_path):
    seen = look(None, tmp_path)
    assert seen["missing"] == [] and 1e7 < seen["weights"] < 40e6
    assert seen["shadow"] == []


def test_no_init_where_it_would_shadow_the_published_kernels_package():
    assert not (ROOT / "kernels" / "__init__.py").exists() and not (ROOT / "engine" / "__init__.py").exists()
    assert (ROOT / "tfmagic" / "engine").is_symlink() and (ROOT / "tfmagic" / "kernels").is_symlink()
