package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

// Consumers that stay open from command to command, and delayed messages; words as consuming_driver.py, each with the
// prefix "s-" because `send` is taken.

type session struct {
	name     string
	consumer rocketmq.PushConsumer
	got      chan event
	calls    int64
}

var (
	sessions  = map[string]*session{}
	producers = map[string]rocketmq.Producer{}
)

func (o options) session(command string) error {
	switch command {
	case "s-send":
		return o.sessionSend()
	case "s-open":
		return o.sessionOpen()
	case "s-take":
		return o.sessionTake()
	case "s-pull":
		return o.sessionPull()
	case "s-close":
		closed := sessions[o["name"]]
		delete(sessions, o["name"])
		return closed.consumer.Shutdown()
	}
	return fmt.Errorf("unknown command %s", command)
}

func (o options) turn(key string, i int, otherwise string) string {
	values := strings.Split(o.text(key, otherwise), ",")
	return values[i%len(values)]
}

func (o options) sessionProducer() (rocketmq.Producer, error) {
	if found, ok := producers[o["ns"]]; ok {
		return found, nil
	}
	p, err := rocketmq.NewProducer(
		producer.WithNsResolver(o.resolver()),
		producer.WithQueueSelector(producer.NewRoundRobinQueueSelector()),
		producer.WithGroupName("go-consuming-producer"),
		producer.WithInstanceName(instance()),
		producer.WithSendMsgTimeout(10*time.Second),
	)
	if err == nil {
		err = p.Start()
	}
	producers[o["ns"]] = p
	return p, err
}

func (o options) sessionSend() error {
	p, err := o.sessionProducer()
	if err != nil {
		return err
	}
	var messages []*primitive.Message
	for i := 0; i < o.number("count", 1); i++ {
		messages = append(messages, o.timedMessage(i))
	}
	if o["mode"] == "batch" {
		if _, err := p.SendSync(context.Background(), messages...); err != nil {
			emit("refused", event{"error": err.Error()})
		} else {
			emit("sent", event{"body": string(messages[0].Body)})
		}
		return nil
	}
	for _, message := range messages {
		now := time.Now().UnixMilli()
		result, err := p.SendSync(context.Background(), message)
		if err != nil {
			emit("refused", event{"error": err.Error()})
			continue
		}
		emit("sent", event{
			"body": string(message.Body), "msg_id": result.MsgID, "queue": result.MessageQueue.QueueId,
			"offset": result.QueueOffset, "at_ms": now, "handle": nil, "broker": result.MessageQueue.BrokerName,
		})
	}
	return nil
}

// This client knows levels; of times it has the properties alone.
func (o options) timedMessage(i int) *primitive.Message {
	message := primitive.NewMessage(o["topic"], []byte(o.body(i)))
	message.WithTag(o.turn("tags", i, "A"))
	message.WithKeys([]string{fmt.Sprintf("%s-k-%d", o.text("prefix", "m"), i)})
	message.WithProperty("n", strconv.Itoa(i))
	if _, found := o["levels"]; found {
		level, _ := strconv.Atoi(o.turn("levels", i, "0"))
		message.WithDelayTimeLevel(level)
	}
	if _, found := o["delays_ms"]; found {
		message.WithProperty("TIMER_DELAY_MS", o.turn("delays_ms", i, "0"))
	}
	if _, found := o["times_ms"]; found {
		message.WithProperty("TIMER_DELIVER_MS", o.turn("times_ms", i, "0"))
	}
	return message
}

func (o options) sessionOpen() error {
	s := &session{name: o["name"], got: make(chan event, 100_000)}
	settings := []consumer.Option{
		consumer.WithNsResolver(o.resolver()),
		consumer.WithGroupName(o["group"]),
		consumer.WithInstance(o.text("instance", instance())),
		consumer.WithConsumeMessageBatchMaxSize(o.number("batch", 1)),
		consumer.WithPullBatchSize(int32(o.number("pull_count", 32))),
		consumer.WithPullThresholdForQueue(int64(o.number("count_max", 1000))),
		consumer.WithPullThresholdSizeForQueue(o.number("size_max_mib", 100)),
		consumer.WithConsumeConcurrentlyMaxSpan(o.number("span_max", 2000)),
	}
	if o["model"] == "broadcasting" {
		settings = append(settings, consumer.WithConsumerModel(consumer.BroadCasting))
	}
	switch where := o.text("from", "first"); where {
	case "first":
		settings = append(settings, consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset))
	case "last":
		settings = append(settings, consumer.WithConsumeFromWhere(consumer.ConsumeFromLastOffset))
	default:
		ms, _ := strconv.ParseInt(where, 10, 64)
		settings = append(settings, consumer.WithConsumeFromWhere(consumer.ConsumeFromTimestamp),
			consumer.WithConsumeTimestamp(time.UnixMilli(ms).Format("20060102150405")))
	}
	c, err := rocketmq.NewPushConsumer(settings...)
	if err != nil {
		return err
	}
	s.consumer = c
	hold := time.Duration(o.number("hold_ms", 0)) * time.Millisecond
	err = c.Subscribe(o["topic"], o.selector(), func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		s.take(atomic.AddInt64(&s.calls, 1), messages)
		time.Sleep(hold)
		return consumer.ConsumeSuccess, nil
	})
	if err != nil {
		return err
	}
	sessions[s.name] = s
	return c.Start()
}

func (s *session) take(call int64, messages []*primitive.MessageExt) {
	for _, message := range messages {
		s.got <- event{
			"consumer": s.name, "call": call, "at_ms": time.Now().UnixMilli(), "topic": message.Topic,
			"body": string(message.Body), "tag": message.GetTags(), "properties": message.GetProperties(),
			"msg_id": message.MsgId, "queue": message.Queue.QueueId, "offset": message.QueueOffset,
		}
	}
}

// What the consumers `names` get until they have `expect` in all, and for `settle_ms` more.
func (o options) sessionTake() error {
	open := o.number("expect", 0)
	rest := time.Duration(o.number("settle_ms", 400)) * time.Millisecond
	end := time.Now().Add(time.Duration(o.number("timeout_s", 20)) * time.Second)
	settled := open <= 0
	if settled {
		end = time.Now().Add(rest)
	}
	for time.Now().Before(end) {
		for _, name := range strings.Split(o["names"], ",") {
			select {
			case one := <-sessions[name].got:
				emit("got", one)
				open--
			case <-time.After(10 * time.Millisecond):
			}
		}
		if open <= 0 && !settled {
			settled, end = true, time.Now().Add(rest)
		}
	}
	if open > 0 {
		emit("incomplete", event{"missing": open})
	}
	return nil
}

var pullStatuses = map[primitive.PullStatus]string{
	primitive.PullFound: "FOUND", primitive.PullNoNewMsg: "NO_NEW_MSG", primitive.PullNoMsgMatched: "NO_MATCHED_MSG",
	primitive.PullOffsetIllegal: "OFFSET_ILLEGAL",
}

// One pull of queue 0 at each of `offsets`; this client wants the broker named.
func (o options) sessionPull() error {
	c, err := rocketmq.NewPullConsumer(
		consumer.WithNsResolver(o.resolver()), consumer.WithGroupName(o["group"]), consumer.WithInstance(instance()),
	)
	if err != nil {
		return err
	}
	if err := c.Subscribe(o["topic"], o.selector()); err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return err
	}
	defer c.Shutdown()
	queue := &primitive.MessageQueue{Topic: o["topic"], BrokerName: o["broker"], QueueId: 0}
	for _, text := range strings.Split(o["offsets"], ",") {
		offset, _ := strconv.ParseInt(text, 10, 64)
		result, err := c.PullFrom(context.Background(), queue, offset, 32)
		if err != nil {
			return err
		}
		var bodies []string
		for _, message := range result.GetMessageExts() {
			bodies = append(bodies, string(message.Body))
		}
		emit("pulled", event{
			"status": pullStatuses[result.Status], "next": result.NextBeginOffset, "bodies": strings.Join(bodies, ","),
		})
	}
	return nil
}
