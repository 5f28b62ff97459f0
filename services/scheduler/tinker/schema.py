"""The protobuf messages of the Tinker API, as far as this server reads and writes them.

Numbers and types of the fields are what a client's messages have; `tests/integration/tinker/test_wire.py` compares them
with what clients send. File and package have distinct names, so that a process can load a client's schema too.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "opentinker.tinker"
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bytes": _FIELD.TYPE_BYTES,
    "string": _FIELD.TYPE_STRING,
    "bool": _FIELD.TYPE_BOOL,
    "double": _FIELD.TYPE_DOUBLE,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "uint32": _FIELD.TYPE_UINT32,
}
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""Types of the elements of arrays."""

_MESSAGES: dict[str, str] = {
    "EncodedText": "1 tokens bytes",
    "Image": "1 data bytes",
    "Audio": "1 dmel bytes",
    "Chunk": "1 encoded_text EncodedText; 2 image Image; 3 dmel Audio",
    "SparseRows": "1 values bytes; 2 crow_indices bytes; 3 col_indices bytes",
    "Tensor": "1 dense bytes; 2 sparse_csr SparseRows; 3 dtype int32; 4 shape repeated int64",
    "Datum": "1 model_input repeated Chunk; 2 loss_fn_inputs map Tensor",
    "LossSetting": "1 number optional double; 2 text optional string",
    "ForwardBackwardRequest": (
        "1 model_id string; 2 seq_id int32; 3 data repeated Datum; 4 loss_fn string; 5 loss_fn_config map double;"
        "6 forward_only bool; 7 loss_fn_config_v2 map LossSetting"
    ),
    "BatchedTensor": "1 data bytes; 2 offsets bytes; 3 dtype int32; 4 trailing_shape repeated int64",
    "ArrayRecord": "1 type_tag string; 2 fields map BatchedTensor; 3 num_datums int64",
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string; 2 loss_fn_outputs repeated ArrayRecord; 3 metrics map double"
    ),
    "TopkLogprobs": "1 token_ids bytes; 2 logprobs bytes; 3 k uint32; 4 length uint32",
    "SampledSequence": (
        "1 stop_reason int32; 2 tokens bytes; 3 logprobs optional bytes; 4 topk_sampled_logprobs TopkLogprobs"
    ),
    "SampleResponse": (
        "1 sequences repeated SampledSequence; 2 prompt_logprobs optional bytes;"
        "3 topk_prompt_logprobs TopkLogprobs; 4 prompt_cache_hit_tokens int32"
    ),
}
"""Fields of each message: number, name, `repeated`, `optional`, or `map` (from strings), type."""


def _typed(field: Any, type_: str) -> None:
    if type_ in _SCALARS:
        field.type = _SCALARS[type_]
    else:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{type_}"


def _add_map(message: Any, field: Any, type_: str) -> None:
    entry = message.nested_type.add(name="".join(part.capitalize() for part in field.name.split("_")) + "Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=_FIELD.TYPE_STRING, label=_FIELD.LABEL_OPTIONAL)
    _typed(entry.field.add(name="value", number=2, label=_FIELD.LABEL_OPTIONAL), type_)
    field.label, field.type = _FIELD.LABEL_REPEATED, _FIELD.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"


def _add_field(message: Any, text: str) -> None:
    number, name, *kind, type_ = text.split()
    field = message.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
    if kind == ["map"]:
        _add_map(message, field, type_)
        return
    _typed(field, type_)
    if kind == ["repeated"]:
        field.label = _FIELD.LABEL_REPEATED
    if kind == ["optional"]:
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="opentinker/tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split(";"):
            _add_field(message, field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [f"{_PACKAGE}.{name}" for name in _MESSAGES]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names}


_CLASSES = _classes()
ForwardBackwardRequest = _CLASSES[f"{_PACKAGE}.ForwardBackwardRequest"]
ForwardBackwardOutput = _CLASSES[f"{_PACKAGE}.ForwardBackwardOutput"]
SampleResponse = _CLASSES[f"{_PACKAGE}.SampleResponse"]
