"""Connecting to Temporal and to the store, the same way for workers, the command and tests."""

from __future__ import annotations

import codecs
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from temporalio.api.common.v1 import Payload
from temporalio.client import Client
from temporalio.contrib.pydantic import PydanticPayloadConverter, pydantic_data_converter
from temporalio.converter import DataConverter, ExternalStorage
from temporalio.envconfig import ClientConfig
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError

from activities.store.blobs import BlobStore
from activities.store.external import BlobStorageDriver
from contracts.activity_names import ErrorType
from contracts.base import BadInput, GivenTwice, no_duplicates
from workers.settings import Settings
from workers.stores import open_store

EXTERNAL_BYTES = 128 * 1024
"""Payloads from this size on leave history. Caisson's own are far smaller; this is for what people and their tools send."""


def open_blobs(settings: Settings) -> BlobStore:
    """Open the blob store that the settings name. Raises StoreError or BadInput with a remedy."""
    return BlobStore(open_store(settings))


_MOST_INPUTS = 2
"""What a person sends, and what a workflow gives itself when it continues as new."""


class InputConverter(PydanticPayloadConverter):
    """Refuses what a person sent that cannot be read at all, instead of failing the workflow task again and again.

    Only values without a type come from people; what Caisson's own code sends has one, and waits for a worker that knows it.
    """

    def from_payloads(self, payloads: Sequence[Payload], type_hints: list[type] | None = None) -> list[Any]:
        """See PayloadConverter. Raises ApplicationError `BadInput` for untyped values that cannot be read, or are too many."""
        if not type_hints and len(payloads) > _MOST_INPUTS:
            raise ApplicationError(
                f"{len(payloads)} inputs were given where one is taken; put all fields into one JSON object",
                type=ErrorType.BAD_INPUT,
                non_retryable=True,
            )
        try:
            return super().from_payloads(payloads if type_hints else list(map(_written_once, payloads)), type_hints)
        except (ValueError, KeyError, RuntimeError) as error:
            if type_hints:
                raise
            raise ApplicationError(
                f"the input cannot be read: {_reason(error)}; it must be one JSON object",
                type=ErrorType.BAD_INPUT,
                non_retryable=True,
            ) from error


def _written_once(payload: Payload) -> Payload:
    """Return a payload without a byte order mark. Raises GivenTwice for JSON in which one of two values would be lost."""
    if payload.metadata.get("encoding") != b"json/plain":
        return payload
    data = payload.data.removeprefix(codecs.BOM_UTF8)
    try:
        json.loads(data, object_pairs_hook=no_duplicates)
    except GivenTwice:
        raise
    except (ValueError, RecursionError):
        pass  # what else is wrong with it is told by the converter that reads it
    return Payload(metadata=payload.metadata, data=data)


def _reason(error: Exception) -> str:
    return str(error.errors(include_url=False)[0]["msg"]) if isinstance(error, ValidationError) else str(error)


def data_converter(blobs: BlobStore) -> DataConverter:
    """The data converter that every client, worker and replayer of Caisson uses."""
    storage = ExternalStorage(drivers=[BlobStorageDriver(blobs)], payload_size_threshold=EXTERNAL_BYTES)
    return dataclasses.replace(pydantic_data_converter, payload_converter_class=InputConverter, external_storage=storage)


async def connect(settings: Settings, blobs: BlobStore | None = None) -> Client:
    """Connect to Temporal as `temporalio.envconfig` says: TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE, TEMPORAL_API_KEY, TEMPORAL_TLS_*,
    TEMPORAL_PROFILE, or the profile file; else localhost:7233. Raises BadInput naming the address and what to do."""
    config = ClientConfig.load_client_connect_config()
    config.setdefault("target_host", "localhost:7233")
    try:
        return await Client.connect(**config, data_converter=data_converter(blobs or open_blobs(settings)))
    except (RuntimeError, RPCError, ValueError) as error:
        address = config.get("target_host")
        raise BadInput(
            f"Temporal cannot be reached at {address}: {error}\n"
            "start a development server with `caisson dev`, or set TEMPORAL_ADDRESS (and TEMPORAL_NAMESPACE, TEMPORAL_API_KEY, "
            "TEMPORAL_TLS_*) or TEMPORAL_PROFILE"
        ) from error
