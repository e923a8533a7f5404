"""What llmobs tells of a server, and why it may not: the table of features.

A feature is available unless something is known that stands in its way; what is not known yet is no
reason.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """`reasons` are the values of the label, each with its meaning for a person."""

    name: str
    tells: str
    reasons: dict[str, str]


FEATURES = (
    Feature(
        "front_end",
        "requests: their outcomes, phases, first tokens and lengths",
        {
            "foreign_frontend": "requests come to the engine from a front end that llmobs does not "
            "see (vLLM's Rust front end, one on another host, one of a program's own); steps, "
            "queue and tokens of the engine are told all the same"
        },
    ),
    Feature(
        "http_edge",
        "arrival, status and delivery as the server of requests sees them",
        {
            "grpc": "requests come over vLLM's gRPC server: they are told from their hand-over to "
            "the engine on, and those refused before are not"
        },
    ),
    Feature(
        "worker",
        "forward and sampling times",
        {
            "ray": "the workers are Ray's actors, which Ray starts by itself, maybe on another "
            "host: nothing is told of them"
        },
    ),
)
MEANING = {(f.name, reason): text for f in FEATURES for reason, text in f.reasons.items()}
