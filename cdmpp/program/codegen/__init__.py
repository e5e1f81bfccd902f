"""What a compiler makes of a program: object code, decoded, and counted as often as its instructions run."""

from cdmpp.program.codegen.compile import (
    ObjectCache,
    code_key,
    compile_to_shared_object,
    compiled_features,
    instruction_counts,
)
from cdmpp.program.codegen.counts import (
    CODEGEN_FEATURES,
    COUNTING_VERSION,
    KINDS,
    STATIC_FEATURES,
    codegen_features,
    require_decoder,
)

__all__ = [
    "CODEGEN_FEATURES",
    "COUNTING_VERSION",
    "KINDS",
    "STATIC_FEATURES",
    "ObjectCache",
    "code_key",
    "codegen_features",
    "compile_to_shared_object",
    "compiled_features",
    "instruction_counts",
    "require_decoder",
]
