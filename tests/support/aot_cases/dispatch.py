"""Launches of kernels/dispatch.py."""

from tests.support.aot import Case

# numbers of slots, blocks and tiles are not specialised, so never ":16"
SORT = {"R": "i32", "E": "i32:16", "blocks": "i32"}
BLOCKS = {"BLOCK_S": 128, "BLOCK_E": 32}
PAIRS = BLOCKS | {"BLOCK_J": 16}
ROWS = {f"{name}_ptr": "*i32:16" for name in ("start", "offsets", "row_token", "row_slot", "slot_row")}
TILES = {"FIRST": 0, "BLOCK_M": 128, "BLOCK_TILES": 64, "BLOCK_E": 32}


def _sort(kernel: str, signature: dict[str, str], constants: dict[str, object]) -> Case:
    return Case(f"dispatch._dispatch_fwd_{kernel}_kernel", signature, constants, max_registers=128)


CASES = [
    _sort("count", SORT | {"idx_ptr": "*i32:16", "less_ptr": "*i32:16"}, BLOCKS),
    _sort("count", SORT | {"idx_ptr": "*i64:16", "less_ptr": "*i32:16"}, BLOCKS),
    _sort(
        "scan",
        {name: "*i32:16" for name in ("less_ptr", "offsets_ptr", "start_ptr")} | {"blocks": "i32"},
        {"SCAN": 1024},
    ),
    _sort("scatter", SORT | ROWS | {"idx_ptr": "*i32:16", "K": "i32"}, PAIRS),
    _sort("scatter", SORT | ROWS | {"idx_ptr": "*i64:16", "K": "i32"}, PAIRS),
    _sort(  # a single block: no start
        "scatter",
        {name: kind for name, kind in (SORT | ROWS).items() if name != "start_ptr"}
        | {"idx_ptr": "*i32:16", "K": "i32"},
        PAIRS | {"start_ptr": None},
    ),
    Case(
        "dispatch._invert_kernel",
        {"row_slot_ptr": "*i32:16", "slot_row_ptr": "*i32:16", "R": "i32"},
        {"BLOCK_R": 1024},
        max_registers=128,
    ),
    *(
        Case(
            "dispatch._tile_map_kernel",
            {"offsets_ptr": "*i32:16", "map_ptr": "*i32:16", "E": "i32:16", "num_tiles": "i32"},
            TILES | {"BLOCK_M": BLOCK_M, "FIRST": FIRST},
            max_registers=128,
        )
        for BLOCK_M, FIRST in ((128, 0), (16, 1))
    ),
]
