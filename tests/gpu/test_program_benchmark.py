"""The benchmark of the GPU program: its reader of HLO on a small stored text, and that it runs."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
from _run_example import run_benchmark

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # benchmarks are no part of the installed package

from benchmarks._cycles import CLOCK_HZ, CycleCosts  # noqa: E402
from benchmarks._kernels import Kernels  # noqa: E402
from benchmarks._launches import Launches  # noqa: E402
from benchmarks.gpu_program._cost import Costs  # noqa: E402
from benchmarks.gpu_program._jobs import Job  # noqa: E402
from benchmarks.gpu_program._project import Simulation, lockstep  # noqa: E402
from jaxpipe.forecast import HARDWARE, Hardware  # noqa: E402
from jaxpipe.programs.compiled import Instruction, parse_thunks  # noqa: E402
from jaxpipe.schedules import lower_schedule, with_ends_apart  # noqa: E402

MODULE = Kernels(Path(__file__).with_name("small_program.txt").read_text())
ACTIVATION, RING, WEIGHT = 64 * 128 * 2, 4 * 64 * 128 * 2, 128 * 256


def line(name: str) -> Instruction:
    return MODULE.computations["body"][name]


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("read", 2 * ACTIVATION + 4),
        ("new_ring", 2 * ACTIVATION + 4),
        ("new_sum", (4 + 2 + 4) * WEIGHT),
        ("product", ACTIVATION + 2 * WEIGHT + 64 * 256 * 2),
    ],
)
def test_slices_of_a_ring_are_read_and_written_alone(name: str, num_bytes: int) -> None:
    assert MODULE.num_bytes("body", line(name)) == num_bytes


def test_products_inside_fusions_and_half_of_causal_attention_are_counted() -> None:
    assert MODULE.flops("body", line("product")) == 2 * 64 * 128 * 256
    assert MODULE.attention_flops("body", line("attention")) == 4 * 2 * 64 * 64 * 32 / 2


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("read", "slices"),
        ("new_ring", "ring"),
        ("new_sum", "sums"),
        ("product", "gemm"),
        ("attention", "attention"),
    ],
)
def test_kernels_are_told_apart(name: str, category: str) -> None:
    costs = Costs(MODULE, HARDWARE["h200"])
    assert list(costs.kernel("body", line(name)).seconds) == [category]
    assert list(costs.kernel("idle", MODULE.computations["idle"]["zeros.5"]).seconds) == ["packed"]


def test_loops_branches_and_collectives_are_read() -> None:
    (loop,) = MODULE.loops()
    assert (loop.body, loop.trip_count) == ("body", 5)
    assert line("branch").branches == ("idle", "loss")
    assert line("send").pairs == ((0, 1), (1, 2))
    assert not line("send").is_sync
    assert MODULE.computations["main"]["reduced"].group == (0, 2, 4, 6)
    assert "Head_0" in MODULE.scopes("body")


def test_a_tick_takes_its_longest_branch_and_its_exchange() -> None:
    machine = HARDWARE["h200"].ideal
    cost = Costs(MODULE, machine).straight("body", 3)
    assert cost.seconds["packed"] == pytest.approx(
        (2 * ACTIVATION + 4 * 2097152) / machine.bytes_per_s
    )
    assert cost.seconds["exchange"] == pytest.approx(ACTIVATION / machine.wire_bytes_per_s)
    assert cost.flops["gemm"] == 2 * 64 * 128 * 256
    assert cost.sent_bytes == pytest.approx(ACTIVATION * 2 / 3)


def test_operations_of_a_step_are_counted_as_published() -> None:
    job = Job("1f1b")
    block = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 11008
    token = 6 * (32 * block + 32768 * 4096) + 12 * 32 * 4096 * 4096
    assert job.flops == 32 * 4096 * token


HEAD = """
%no_loss (a.1: f32[1]) -> f32[1] {
  ROOT %a.1 = f32[1]{0} parameter(0)
}
%loss (a.2: f32[1]) -> f32[1] {
  %a.2 = f32[1]{0} parameter(0)
  ROOT %head = f32[2]{0} custom-call(), custom_call_target="x",\
 metadata={op_name="branch_1_fun/Head/dot_general"}
}
"""
TICK = """
%body{i} (a.3: f32[1]) -> f32[1] {{
  %a.3 = f32[1]{{0}} parameter(0)
  %send = (f32[1]{{0}}, f32[1]{{0}}) collective-permute-start(%a.3), source_target_pairs={{{{0,1}}}}
  %block = f32[5]{{0}} custom-call(), custom_call_target="x",\
 metadata={{op_name="Block_0/dot_general"}}
  %ends = f32[1]{{0}} conditional(%a.3, %a.3, %a.3), branch_computations={{%no_loss, %loss}}
  ROOT %arrived = f32[1]{{0}} collective-permute-done(%send)
}}
"""


def test_stages_take_their_own_branches_and_wait_for_each_other() -> None:
    """A block of 20 bytes in every tick, at a byte a second.

    8 more bytes for the loss of each of 4 microbatches.
    """
    program = lower_schedule("1f1b", 4, 2)
    text = [
        HEAD,
        *(TICK.format(i=i) for i in range(len(program.runs))),
        "ENTRY %main (a: f32[1]) -> f32[1] {",
    ]
    for i, run in enumerate(program.runs):
        count = f'backend_config={{"known_trip_count":{{"n":"{run.stop - run.start}"}}}}'
        scope = f'metadata={{op_name="step/ticks_{run.start}_{run.stop}/while"}}'
        text.append(
            f"  %loop{i} = f32[1]{{0}} while(), condition=%no_loss, body=%body{i}, {scope}, {count}"
        )
    machine = Hardware("slow", 1e15, 1e9, 1.0, 1e9, traffic_share=1.0, latency_s=0.0, branch_s=0.0)
    costs = Costs(Kernels("\n".join([*text, "}"])), machine)
    found = Simulation(costs, program, 2, "Block").run()
    assert found.step_s == pytest.approx(program.num_ticks * 20 + 4 * 8, rel=1e-6)
    assert found.longest.total_s == pytest.approx(28, rel=1e-6)


GATHER = """
ENTRY %main (a: f32[2]) -> f32[1] {
  %a = f32[2]{0} parameter(0)
  %cast = f32[3]{0} custom-call(), custom_call_target="x"
  %gather = (f32[1]{0}, f32[3]{0}, f32[2]{0}, f32[6]{0}) all-gather-start(%cast, %a),\
 replica_groups={{0,1},{2,3}}
  %block = f32[5]{0} custom-call(), custom_call_target="x",\
 metadata={op_name="step/ticks_0_1/while/Block_0/dot"}
  %weights = (f32[2]{0}, f32[6]{0}) all-gather-done(%gather)
"""


def test_of_a_gather_outside_of_loops_what_the_first_tick_does_not_hide_counts() -> None:
    """12 bytes are cast, and 16 gathered from another device.

    Meanwhile the first tick moves 20, at a byte a second.
    """
    program = with_ends_apart(lower_schedule("1f1b", 4, 2))
    (steady,) = (run for run in program.runs if run.stop - run.start > 1)
    ticks = f'metadata={{op_name="step/ticks_{steady.start}_{steady.stop}/while"}}'
    loop = f"  %loop = f32[1]{{0}} while(), condition=%no_loss, body=%body0, {ticks}"
    module = Kernels("\n".join([HEAD, TICK.format(i=0), GATHER, loop, "}"]))
    machine = Hardware(
        "slow", 1e15, 1e9, 1.0, 1e9, 0.5, traffic_share=1.0, latency_s=0.0, branch_s=0.0
    )
    for hosts, gathered in (((0, 0, 1, 1), 16 / 0.8e9), ((0, 1, 0, 1), 16 / 0.5)):
        costs = Costs(module, machine, hosts)
        assert costs.wire_s(module.computations["main"]["gather"], 4) == pytest.approx(gathered)
        found = Simulation(costs, program, 4, "Block").run()
        assert found.outside_s == pytest.approx(12 + max(0.0, gathered - 20))
        assert found.step_s == pytest.approx(found.outside_s + 20 + 4 * 28)


LOCKSTEP = """
%scan (a.1: f32[5]) -> f32[5] {
  %a.1 = f32[5]{0} parameter(0)
  %send = (f32[8]{0}, f32[8]{0}) collective-permute-start(%a.1),\
 source_target_pairs={{0,1},{1,2},{2,3},{3,3}}
  %block = f32[5]{0} custom-call(), custom_call_target="x"
  %arrived = f32[8]{0} collective-permute-done(%send)
  ROOT %sum = f32[1]{0} all-reduce(%block), replica_groups={{0,1},{2,3}}
}
ENTRY %main (a: f32[5]) -> f32[5] {
  %a = f32[5]{0} parameter(0)
  ROOT %loop = f32[5]{0} while(%a), body=%scan, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_where_all_devices_do_the_same_an_exchange_costs_what_no_kernel_hides() -> None:
    """In each of 3 rounds a kernel of 20 bytes beside an exchange of 32, and a sum of 4."""
    machine = Hardware(
        "slow", 1e15, 1e9, 1.0, 1.0, traffic_share=1.0, wire_share=1.0, latency_s=0.0, branch_s=0.0
    )
    cost = lockstep(Costs(Kernels(LOCKSTEP), machine), "main", 4)
    assert cost.seconds == pytest.approx({"slices": 3 * 20, "exchange": 3 * (12 + 4)})
    assert cost.sent_bytes == pytest.approx(3 * (32 * 3 / 4 + 4))


TPU = """
%cond (a.1: s32[]) -> pred[] {
  %a.1 = s32[] parameter(0)
  %end = s32[]{:T(128)} constant(7), metadata={op_name="step"}
  ROOT %lt = pred[] compare(%a.1, %end), direction=LT
}
%body (a.2: bf16[64,128]) -> bf16[64,32] {
  %a.2 = bf16[64,128]{1,0} parameter(0)
  %weight = bf16[128,32]{1,0} constant(0)
  %x = bf16[64,128,1]{1,0,2} bitcast(%a.2)
  %heads = bf16[8,32,128]{2,1,0} constant(0)
  %q = bf16[2,64,16]{2,1,0} constant(0)
  %product = bf16[64,32]{1,0} convolution(%a.2, %weight), dim_labels=bf_io->bf,\
 backend_config={"estimated_cycles":"700"}
  %by_heads = bf16[64,8,32]{2,0,1} convolution(%x, %heads),\
 window={size=8 pad=7_7 rhs_reversal=1}, dim_labels=bf0_0oi->b0f,\
 backend_config={"estimated_cycles":"300"}
  %unknown = bf16[64,32]{1,0} copy(%product),\
 backend_config={"estimated_cycles":"9223372036854775807"}
  %splash_mha_dq_no_residuals.1 = (bf16[2,64,16]{2,1,0}) custom-call(%x, %x, %q),\
 frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="step/attention"}
  ROOT %out = bf16[64,32]{1,0} bitcast(%product)
}
ENTRY %main (a: bf16[64,128]) -> bf16[64,128] {
  %a = bf16[64,128]{1,0} parameter(0)
  ROOT %loop = bf16[64,128]{1,0} while(%a), condition=%cond, body=%body
}
"""


def test_programs_for_tpus_are_read() -> None:
    """Products are convolutions there, and loops do not say how often they go round."""
    module = Kernels(TPU)
    body, attention = module.computations["body"], 3 * 2 * 64 * 64 * 16
    assert module.trip_count(module.loops()[0]) == 7
    assert module.flops("body", body["product"]) == 2 * 64 * 128 * 32
    assert module.flops("body", body["by_heads"]) == 2 * 64 * 128 * 8 * 32
    kernel = body["splash_mha_dq_no_residuals.1"]
    assert kernel.scope == "step/attention"
    assert module.attention_flops("body", kernel) == attention
    machine = HARDWARE["v5p"]
    cost = lockstep(CycleCosts(module, "v5p"), "main", 8)
    attention_s = attention / machine.flops_per_s / machine.attention_share
    assert cost.total_s == pytest.approx(7 * (1000 / CLOCK_HZ["v5p"] + attention_s))


def test_sums_over_all_chips_of_a_slice_use_all_links() -> None:
    module = Kernels(LOCKSTEP)
    lines, plain = module.computations["scan"], Costs(module, HARDWARE["v5p"])
    costs = CycleCosts(module, "v5p")
    assert costs.wire_s(lines["sum"], 2) == pytest.approx(plain.wire_s(lines["sum"], 2) / 3)
    for line, num_devices in ((lines["sum"], 4), (lines["send"], 4)):
        assert costs.wire_s(line, num_devices) == plain.wire_s(line, num_devices)


THUNKS = """\
000: kCommandBuffer [source | next=002 (1)]
    001: kCustomKernel [source | sink] before
002: kWhile         [prev=000 (1) | sink]
condition:
    003: kCustomKernel [source | sink] compare
  body:
    000: kCommandBuffer [source | next=005 (1)]
        004: kCustomKernel [source | sink] product
        005: kConditional  [source | sink]
          branch_0:
            006: kCopy         [source | sink] kCopy
          branch_1:
            007: kCuDnn        [source | sink] attention
    009: kAsyncStart    [source | sink] stream=communication_stream[0], async_id=9
        008: kCollectivePermute [source | sink] kCollectivePermute
    010: kCustomKernel  [source | sink] alone
    011: kConditional   [source | sink]
      branch_0:
        012: kAllReduce     [source | sink] kAllReduce
      branch_1:
        013: kCustomKernel  [source | sink] zeros
    014: kWhile         [source | sink]
    condition:
        015: kCustomKernel [source | sink] compare
      body:
        016: kCustomKernel [source | sink] once
    017: kWhile         [source | sink]
    condition:
        018: kCustomKernel [source | sink] compare
      body:
        019: kCustomKernel [source | sink] blocks
    020: kAsyncDone     [source | sink] async_id=9
021: kCustomKernel  [source | sink] after
"""
KNOWN = """
%body (a.1: f32[1]) -> f32[1] {
  %a.1 = f32[1]{0} parameter(0)
  ROOT %blocks = f32[1]{0} while(%a.1), body=%x, backend_config={"known_trip_count":{"n":"4"}}
}
"""


def test_what_waits_for_the_host_is_counted_outside_of_graphs() -> None:
    names = {"000": "graph", "002": "ticks", "014": "once", "017": "blocks"}
    thunks = parse_thunks(THUNKS, names, "ticks")
    assert [each.kind for each in thunks if each.in_graph] == [
        "kCustomKernel",
        "kConditional",
        "kCopy",
        "kCuDnn",
    ]
    module = Kernels(KNOWN)
    found = Launches.of(thunks, module)
    assert found == Launches(graphs=1, in_graphs=3, alone=6, collectives=2, waits=2)
    assert Launches.of(thunks, Kernels("")).waits == 3


@pytest.mark.gpu_aot
@pytest.mark.skipif(
    not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))),
    reason="needs the CUDA plugin",
)
def test_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    run_benchmark("gpu_program", "--smoke", "--json", str(path))
    for found in map(json.loads(path.read_text()).get, ("1f1b", "llama")):
        assert found["total_gb"] > 0
        assert math.isfinite(found["real"]["step_ms"])
        assert found["real"]["middle"]["tflop"]["gemm"] > 0
        assert found["ideal"]["step_ms"] < found["real"]["step_ms"]


@pytest.mark.gpu_aot
@pytest.mark.skipif(
    not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))),
    reason="needs the CUDA plugin",
)
def test_forms_of_others_are_compiled_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    rows = "GPipe, scan in shard_map:all", "circular, scan over vmap:cheap", "1f1b:nothing"
    run_benchmark("peers_compiled", "--smoke", "--json", str(path), "--only", ";".join(rows))
    for found in map(json.loads(path.read_text()).get, rows):
        assert found["total_gb"] > 0
        assert found["tflop"] > 0
        assert found["sent_gb"] > 0
        assert found["step_ms"] > found["exposed_ms"]
