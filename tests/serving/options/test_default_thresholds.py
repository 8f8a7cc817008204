"""The default thresholds are written once, in `UBatchConfig`: every command follows them."""

from __future__ import annotations

import json
import subprocess
import sys

from repository import ROOT, TINY_MOE

CHANGED = {"dbo_decode_token_threshold": (32, 47), "dbo_prefill_token_threshold": (512, 611)}
CODE = """
import json
from importlib.machinery import SourceFileLoader

read = SourceFileLoader.get_code
changed = json.loads({changed!r})

def get_code(loader, name):
    if name != "ubatch.wrapping.config":
        return read(loader, name)
    text = loader.get_source(name)
    for setting, (old, new) in changed.items():
        assert f"{{setting}}: int = {{old}}\\n" in text
        text = text.replace(f"{{setting}}: int = {{old}}\\n", f"{{setting}}: int = {{new}}\\n")
    return compile(text, loader.path, "exec")

SourceFileLoader.get_code = get_code

from serving.options import merge, resolve_settings, read_layers, SERVE, to_engine_options
from serving.options.flags.commands import COMMANDS
from serving.options.overlap import overlap_config
from ubatch import UBatchConfig

layers, _ = read_layers(SERVE, "ubatch serve", "", [{model!r}, "--device", "cpu", "--enable-dbo"])
configs = {{"config": UBatchConfig(), "file": UBatchConfig.from_mapping({{}})}}
configs["server"] = to_engine_options(resolve_settings(*layers)).dbo
configs |= {{table.program: overlap_config(merge(table=table)) for table in COMMANDS}}
seen = {{where: {{name: getattr(config, name) for name in changed}} for where, config in configs.items()}}
seen["flags"] = {{name: SERVE.settings[name].default for name in changed}}
print(json.dumps(seen))
"""


def test_a_changed_default_is_seen_everywhere() -> None:
    code = CODE.format(changed=json.dumps(CHANGED), model=str(TINY_MOE))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert {"config", "file", "flags", "server", "ubatch generate", "ubatch trace", "ubatch tune"} <= seen.keys()
    new = {name: value for name, (_, value) in CHANGED.items()}
    assert seen == dict.fromkeys(seen, new)
