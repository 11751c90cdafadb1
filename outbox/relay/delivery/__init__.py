"""The tasks that send deliveries and record their attempts.

The pipeline of an attempt:

Before: `dispatcher.Dispatcher.add_endpoints` registers the lanes that this replica owns.
`batch_feed.BatchFeed` reports new deliveries to `dispatcher.Dispatcher.notify_new_deliveries`, and
`fetcher.DeliveryFetcher.run` reads them into the buffers of their lanes.

1. Decide: `lane_worker.LaneWorker._work` executes the commands of `outbox.core.delivery.lane.Lane`.
   `attempt_sender.AttemptSender.send` makes the attempt of a `Send`, steps 2 to 4.
2. Wait for a slot: `admission.AdmissionQueue.begin`, or `admission.AdmissionQueue.wait` if none is
   free.  After a wait, `attempt_sender.revalidate` checks the decision again.
3. Build and sign: `request_cache.RequestCache.build`.
4. Send: `outbox.destinations.interface.Transport.send`.  During a request run, it sends further
   requests from `lane_run.LaneRun.follow`.  To a broker: `broker_attempts.BrokerAttempts.append`.
5. Settle: `settle.settle` finds the outcome, and applies it to the lane and the circuit breaker.
   `breaker_follow_up.BreakerFollowUp.record_result` acts on what changes about the breaker.
6. Record: `lane_worker.LaneWorker._finish` queues a success with `recorder.Recorder.add`, for the
   next group commit.  It waits for `recorder.Recorder.write` if the record has to be durable first:
   a failure, a dead letter.

After: the lane decides again.  `recorder.Recorder.checkpoint` writes the lane's durable progress,
and `endpoint_supervisor.EndpointSupervisor` the state of the endpoint's circuit breaker.

What keeps an attempt from being sent, in the order in which it is asked:
`owned_endpoints.EndpointRuntime.usable`, `owned_endpoints.LaneRuntime.gate`, then the lane's `next`
(within a request run `next_in_run`), the slot, after a wait for it the lane's `revalidate`, and
immediately before the bytes are written the lease.

The data of an event has six names on this way: `Delivery` (the row that was read), `Send` (the
command), `Request` (signed), `AttemptResult` (the response), `Attempt` (all of these, completed)
and `Record` (with its row of the attempt log), or `Successes` for those of a run.
"""
