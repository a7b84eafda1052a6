"""Language models that answer: alone, with an adapter, or as a run tuned them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, first_line
from inlay.methods.folder import DEFAULT
from inlay.tasks import TaskSchema, templates
from inlay.tasks.conversations import Unusable
from inlay.workflow.generation import Writer
from inlay.workflow.loaded import LoadedRun, find_run
from inlay.workflow.notes import Say
from inlay.workflow.predict import check_trust, restore_adapters
from inlay.workflow.prompt_folders import PromptAdapter, find_base, look, open_writer, put_in
from inlay.workflow.tune import DEFAULT_OUT

Message = dict[str, str]


@dataclass(frozen=True)
class Speaker:
    """A writer, and the name of the adapter in its model that answers; None is the model alone.

    `title` is what it is for people. `schema` is the task of the run that it is from; `stands_for`, the adapter of a
    folder, which may stand for a prompt.
    """

    writer: Writer
    adapter: str | None
    title: str
    schema: TaskSchema | None = None
    stands_for: PromptAdapter | None = None

    @property
    def is_prompt(self) -> bool:
        """Whether its adapter is on record as standing for a prompt."""
        return self.stands_for is not None and self.stands_for.prompt_tokens is not None

    @property
    def learnt_chats(self) -> bool:
        """Whether it is a run that was trained on conversations: each text is then a user's message."""
        return self.schema is not None and self.schema.chat is not None

    def fill(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Rows of a run as it was trained on them, up to where it begins to write."""
        schema = self.schema
        assert schema is not None
        if not self.learnt_chats:
            return [templates.render(schema.full_template, row)[0] for row in rows]
        template = schema.template_of_chats(self.writer.tokenizer)
        try:
            return [template.prompt(row["messages"]) for row in rows]
        except Unusable as error:
            raise InlayError(f"A conversation has {error}.") from None

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self.writer.tokenizer.chat_template)

    def check_template(self, next_step: str) -> None:
        """An error where the tokenizer has no chat template."""
        if not self.has_template:
            raise InlayError(f"{self.writer.name} has no chat template: {next_step}.")

    def write_chat(self, messages: Sequence[Message]) -> str:
        """Messages as the chat template writes them, with its own tokens of beginning; the assistant's turn begins."""
        return write_messages(self.writer.tokenizer, messages, True)


def write_messages(tokenizer: Any, messages: Sequence[Message], more: bool) -> str:
    """What the chat template writes; at its end the assistant's turn begins if there is to be `more`."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=more))
    except Exception as error:  # a template is somebody's program
        raise InlayError(f"The chat template refuses this conversation: {first_line(error)}") from error


def open_speaker(
    run: Path | str | None = None,
    *,
    adapter: Path | str | None = None,
    model: str | None = None,
    task: str | None = None,
    out: Path | str = DEFAULT_OUT,
    trust_remote_code: bool = False,
    say: Say | None = None,
) -> Speaker:
    """Load what answers: a finished run, the folder of an adapter with its base model, or a model alone.

    Beside a run or an adapter, `model` names the base model where it has moved. `task` is one of a run's several.
    """
    if run is not None and adapter is not None:
        raise InlayError("Give --run or --adapter, not both: each has the base model and what was trained.")
    if run is not None:
        return _of_run(LoadedRun(find_run(run, out), task=task, say=say), model, trust_remote_code)
    if task is not None:
        raise InlayError(f"task={task!r} is one of a run's several tasks: give --run, or leave it out.")
    if adapter is not None:
        found = look(adapter)
        writer = open_writer(model or find_base(found), trust_remote_code=trust_remote_code)
        put_in(found, writer)
        return Speaker(writer, DEFAULT, f"{writer.name} with {found.place}", stands_for=found)
    if model is None:
        raise InlayError("Give what is to write: --run runs/<id>, --adapter FOLDER, or --model by itself.")
    writer = open_writer(model, trust_remote_code=trust_remote_code)
    return Speaker(writer, None, writer.name)


def _of_run(loaded: LoadedRun, model: str | None, trust_remote_code: bool) -> Speaker:
    run, schema = loaded.run, loaded.schema
    if not schema.writes_text:
        raise InlayError(
            f"The run {run.id} is of kind {schema.kind!r} and writes no texts: `inlay predict --run {run.folder}` "
            "answers with it. Give a run of a language model."
        )
    check_trust(run.spec.trust_remote_code, trust_remote_code, f"The run {run.id}")
    spec = run.spec.with_(model=model or run.spec.model, trust_remote_code=trust_remote_code)
    name = loaded.task if spec.tasks else DEFAULT
    adapted, backbone = restore_adapters(spec, schema, run.adapter, [name])
    backbone.model = adapted
    writer = Writer(backbone, spec.precision)
    if schema.chat is not None:  # the template of training, and the tokens that end its turns
        template = schema.template_of_chats(writer.tokenizer)
        writer.tokenizer.chat_template = template.fixed
        writer.ends |= frozenset(template.stops)
    return Speaker(writer, name, f"{backbone.name} with {run.id}", schema=schema)
