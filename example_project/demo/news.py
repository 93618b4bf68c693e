"""What has changed between two looks, in words."""

from __future__ import annotations

from collections.abc import Iterator

from example_project.demo.scene import Scene, Story, wakes


def news(before: Scene, now: Scene) -> list[str]:
    known = {story.task_id: story for story in before.stories}
    return [
        text
        for story in now.stories
        for text in _story_news(known.get(story.task_id, Story("", "")), story, now)
    ]


def _story_news(before: Story, story: Story, scene: Scene) -> Iterator[str]:
    yield from _woken(before, story, scene)
    for act in story.acts[len(before.acts) :]:
        yield f"{story.title}: step done: {act.action}"
    for due_at in story.dues[len(before.dues) :]:
        yield f"{story.title}: {story.state} until day {scene.day(due_at):.1f}"
    if story.is_over and not before.is_over:
        yield f"{story.title}: {story.state}, {story.result!r}"


def _woken(before: Story, story: Story, scene: Scene) -> Iterator[str]:
    seen = len(wakes(before, scene.uptimes))
    for number, wake in enumerate(wakes(story, scene.uptimes)[seen:], start=seen + 1):
        process = story.runs[number].pid
        yield (f"{story.title}: woke {wake.text}; run {number + 1} of the body, in process {process}")
