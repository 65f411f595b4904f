"""The cost model reads the launch configs and main loops, and predicts more time for more work."""

from moe_runtime.bench import cost_model, shapes

LOOPS = """
grouped_gemm._up_fwd_kernel up 128x128x64: 182 registers, 0 bytes of stack, 150 instructions: 8
grouped_gemm_backward._grouped_gemm_bwd_w_kernel dw 128x256x64: 195 registers, 362 instructions
"""


def test_loops_are_read_by_product():
    assert cost_model.read_loops(LOOPS) == {"up": 150, "dw": 362}


def test_predictions_are_below_the_ceilings():
    for shape in shapes.kernels().values():
        forward, backward = cost_model.layer(shape, {})
        for launch in forward + backward:
            assert 0 <= launch.flops / launch.seconds < cost_model.CEILING


def test_a_loop_of_many_instructions_is_slower():
    shape = shapes.GPU["OLMoE"]
    fast = cost_model.layer(shape, {})[1]
    slow = cost_model.layer(shape, {"dw": 3000})[1]
    for one, other in zip(fast, slow, strict=True):
        assert (other.seconds > one.seconds) == (one.name == "dw")
    assert slow[2].bound == "instructions"
