"""The AsyncAPI 3 document of all events, from the classes alone: docs/asyncapi.json.

One channel for the log, one for the commands of a target; one message for each event, its payload the envelope with
the body's schema.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from segue.events import codec
from segue.events.base import Body, Envelope

ASYNCAPI_VERSION = "3.0.0"
REFERENCE = "#/components/schemas/{name}"


def document() -> dict[str, Any]:
    """The document; the same classes give the same document."""
    classes = list(codec.known_types().values())
    schemas, components = msgspec.json.schema_components([*classes, Envelope], ref_template=REFERENCE)
    messages = {_name(cls): _message(cls, schema) for cls, schema in zip(classes, schemas, strict=False)}
    commands = [cls for cls in classes if cls.SPEC.kind == "command"]
    return {
        "asyncapi": ASYNCAPI_VERSION,
        "info": {
            "title": "segue events",
            "version": "1",
            "description": "Every fact and command of a run, as they stand in its log.",
        },
        "defaultContentType": "application/json",
        "channels": {
            "log": {
                "address": "{run}:log",
                "description": "The one order of all facts and commands of a run.",
                "parameters": {"run": {"description": "id of the run"}},
                "messages": {_name(cls): {"$ref": f"#/components/messages/{_name(cls)}"} for cls in classes},
            },
            "commands": {
                "address": "{run}:to:{target}",
                "description": "The commands for one target, delivered until acknowledged.",
                "parameters": {
                    "run": {"description": "id of the run"},
                    "target": {"description": "trainer, router, supervisor, engine-N or session-N"},
                },
                "messages": {_name(cls): {"$ref": f"#/components/messages/{_name(cls)}"} for cls in commands},
            },
        },
        "operations": {
            "append": {"action": "send", "channel": {"$ref": "#/channels/log"}},
            "follow": {"action": "receive", "channel": {"$ref": "#/channels/log"}},
            "handle": {"action": "receive", "channel": {"$ref": "#/channels/commands"}},
        },
        "components": {"messages": messages, "schemas": components},
    }


def _name(cls: type[Body]) -> str:
    return cls.__name__


def _message(cls: type[Body], schema: dict[str, Any]) -> dict[str, Any]:
    spec = cls.SPEC
    says = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0] if "__doc__" in vars(cls) else ""
    told = {"kind": spec.kind, "key": list(spec.key), "identity": list(spec.identity), "follows": spec.follows}
    return {
        "name": spec.name,
        "summary": " ".join(says.split()),
        "x-version": spec.version,
        "x-event": {**told, "emitter": spec.emitter, "handler": spec.handler},
        "payload": {
            "allOf": [
                {"$ref": REFERENCE.format(name="Envelope")},
                {"properties": {"type": {"const": spec.name}, "version": {"const": spec.version}, "body": schema}},
            ]
        },
    }
