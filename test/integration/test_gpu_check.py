#!/usr/bin/python3
"""scripts/gpu-check where there is no GPU, and where its time is over before it has begun: what it says, and its exit status. What it
does on a GPU only a GPU can show."""
import json
import unittest

from rig import *

CHECK = pathlib.Path(__file__).resolve().parent.parent.parent / "scripts" / "gpu-check"


class Check(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="reshard-gpu-check-")
        self.addCleanup(self.folder.cleanup)
        self.path = pathlib.Path(self.folder.name)

    def tool(self, name, script):
        (self.path / "bin").mkdir(exist_ok=True)
        tool = self.path / "bin" / name
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)

    def check(self, **environment):
        out = self.path / "out"
        out.mkdir(exist_ok=True)
        env = {k: v for k, v in os.environ.items() if not k.startswith("GPU_CHECK_")}
        env |= {"PATH": f"{self.path / 'bin'}:{os.environ['PATH']}", "OUT": str(out), **environment}
        r = subprocess.run([CHECK], capture_output=True, text=True, timeout=WAIT_S, env=env)
        told = out / "gpu-check.json"
        return r, json.loads(told.read_text()) if told.exists() else None

    def test_without_a_gpu_it_says_so_and_exits_77(self):
        for nvidia_smi in ("exit 9", "exit 0", "echo 'NVIDIA-SMI has failed' >&2; exit 1"):
            self.tool("nvidia-smi", nvidia_smi)
            r, told = self.check()
            self.assertEqual(r.returncode, 77, r.stderr)
            self.assertIn("no GPU here", r.stdout)
            self.assertIsNone(told)  # nothing was checked, so there is nothing to be read as a result

    def test_a_gpu_without_a_compiler_is_told_with_the_remedy(self):
        self.tool("nvidia-smi", "echo 9.0")
        r, _ = self.check(CUDA_HOME=str(self.path))
        self.assertEqual(r.returncode, 1)
        self.assertIn("set CUDA_HOME", r.stdout)

    def test_what_there_was_no_time_for_is_in_the_table_and_in_json(self):
        self.tool("nvcc", "exit 1")
        (self.path / "include").mkdir()
        (self.path / "include" / "nccl.h").touch()
        r, told = self.check(CUDA_HOME=str(self.path), GPU_CHECK_STANDIN=str(self.path), GPU_CHECK_LIMIT="2")
        self.assertEqual(r.returncode, 1, r.stdout + r.stderr)
        lines = r.stdout.splitlines()
        self.assertRegex(lines[-3], "build +SKIPPED +no time left")
        self.assertRegex(lines[-2], "everything else +SKIPPED +nothing was built")
        self.assertEqual(lines[-1], "0 passed, 0 failed, 2 skipped")
        self.assertIn("STAND-IN: says nothing about a GPU", r.stdout)
        self.assertEqual((told["standin"], told["failed"], told["skipped"]), (True, 0, 2))
        self.assertEqual([x.split()[0] for x in told["steps"]], ["build", "everything"])


if __name__ == "__main__":
    main()
