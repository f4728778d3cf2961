"""A run in bfloat16 says at its start if the processor has no instructions for it."""

import pytest

from engine.assembly.cpu_notes import lacks

CASCADE_LAKE = "model name\t: Intel(R) Xeon(R) Processor\nflags\t\t: fpu avx512f avx512_vnni\n"
GENOA = "model name\t: AMD EPYC 9354\nflags\t\t: fpu avx512f avx512_bf16\n"
SAPPHIRE_RAPIDS = "flags\t\t: fpu amx_tile amx_bf16\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd\n"


@pytest.mark.parametrize(
    ("cpuinfo", "dtypes", "told"),
    [
        (CASCADE_LAKE, ["float32", "bfloat16"], True),
        (CASCADE_LAKE, ["float32", "float32"], False),
        (GENOA, ["bfloat16"], False),
        (SAPPHIRE_RAPIDS, ["bfloat16"], False),
        (ARM, ["bfloat16"], False),
        (None, ["bfloat16"], False),
    ],
)
def test_a_processor_that_is_known_to_emulate_bfloat16_is_told(tmp_path, cpuinfo, dtypes, told):
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    lines = lacks(dtypes, tmp_path / "cpuinfo")
    assert ["bfloat16" in line and "dtype=float32" in line for line in lines] == [True] * told
