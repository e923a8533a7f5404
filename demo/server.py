"""A user's own server script: vLLM's OpenAI-compatible server, with vLLM's arguments."""

# The guard below is needed: vLLM may start its engine processes by spawning, which imports this
# file again.
if __name__ == "__main__":
    import uvloop
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.api_server.entry import run_server
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    except ImportError:  # before vLLM moved its launchers out of `entrypoints.openai`
        from vllm.entrypoints.openai.api_server import run_server
        from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args

    args = make_arg_parser(FlexibleArgumentParser(description=__doc__)).parse_args()
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args))
