from moe_runtime.cli import main

main("papers.cli")
