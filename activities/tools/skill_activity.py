"""Reading a skill when the model asks for it."""

from __future__ import annotations

import difflib
import json

from temporalio import activity

from activities.heartbeat import beating
from activities.store.blobs import BlobStore
from activities.workspace.names import printable
from contracts.activity_names import LOAD_SKILL
from contracts.prepare import LoadSkillInput, LoadSkillResult
from contracts.sandbox import WORKSPACE

_NAMED = 50


class SkillActivities:
    """Reads skills as they were when the run began."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs

    @activity.defn(name=LOAD_SKILL.name)
    async def load_skill(self, given: LoadSkillInput) -> LoadSkillResult:
        """Return what a skill says. That there is none of the name is told the model with the names there are."""
        async with beating():
            skills = {one["name"]: one for one in json.loads(await self._blobs.get(given.skills))}
            skill = skills.get(given.name.strip())
            if skill is None:
                near = difflib.get_close_matches(given.name[:100], skills, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                names = ", ".join(sorted(skills)[:_NAMED]) + (", ..." if len(skills) > _NAMED else "")
                text = f"load_skill: there is no skill {printable(given.name, 100)!r}{hint} The skills are: {names}"
                return LoadSkillResult(output=await self._blobs.put_text(text), found=False)
            place = f"{WORKSPACE}/{skill['directory']}"
            body = skill["body"] or "(it says nothing; look at the files beside it)"
            text = f"The skill {skill['name']}. Files that it names lie in {place}\n\n{body}"
            return LoadSkillResult(output=await self._blobs.put_text(text), found=True)
