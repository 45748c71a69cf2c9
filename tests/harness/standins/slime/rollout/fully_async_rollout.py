"""How slime's fully asynchronous rollout takes finished groups from its worker, with its defect.

Our own text, but for the lines by which a patch recognizes it.
"""

import asyncio
import queue


class AsyncRolloutWorker:
    def __init__(self, data_buffer, concurrency):
        self.data_buffer, self.concurrency, self.running = data_buffer, concurrency, True
        self.output_queue = queue.Queue(maxsize=1000)

    def get_completed_groups(self):
        return [self.output_queue.get_nowait() for _ in range(self.output_queue.qsize())]

    async def _loop(self):
        active_tasks, max_concurrent = set(), self.concurrency
        while self.running:
            active_tasks = {task for task in active_tasks if not task.done()}
            while len(active_tasks) < max_concurrent and self.running:
                for group in self.data_buffer.get_samples(1):
                    active_tasks.add(asyncio.create_task(self.generate(group)))
            await asyncio.sleep(1)

    async def generate(self, group):
        self.output_queue.put((group[0].index, group))


async def _generate_rollout_async(worker, target):
    def _key(group):
        return group[0].index

    collected = {}
    while len(collected) < target:
        collected.update(worker.get_completed_groups())
        await asyncio.sleep(0)
    return sorted(collected.values(), key=_key)[:target]
