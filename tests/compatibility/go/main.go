// Drives the unmodified Go remoting client for the compatibility tests.
//
// One process serves many scenarios: a line on stdin is `COMMAND key=value ...` (values URL-encoded), the answer is
// JSON lines on stdout, the last of them {"event": "done"} or {"event": "failed", "error": ...}. The same words as
// java/Driver.java.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

const (
	settle  = 400 * time.Millisecond  // how long a surplus message may still show up
	balance = 2500 * time.Millisecond // two starts, a notice and a rebalance each
)

var output sync.Mutex

type event map[string]any

func emit(name string, members event) {
	if members == nil {
		members = event{}
	}
	members["event"] = name
	line, _ := json.Marshal(members)
	output.Lock()
	defer output.Unlock()
	fmt.Println(string(line))
}

type options map[string]string

func (o options) text(key, otherwise string) string {
	if value, found := o[key]; found {
		return value
	}
	return otherwise
}

func (o options) number(key string, otherwise int) int {
	if value, err := strconv.Atoi(o[key]); err == nil {
		return value
	}
	return otherwise
}

func main() {
	rlog.SetLogLevel("error")
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		given := options{}
		for _, word := range words[1:] {
			key, value, _ := strings.Cut(word, "=")
			given[key], _ = url.QueryUnescape(value)
		}
		if err := given.run(words[0]); err != nil {
			emit("failed", event{"error": err.Error()})
		} else {
			emit("done", nil)
		}
	}
}

func (o options) run(command string) (err error) {
	defer func() {
		if reason := recover(); reason != nil {
			err = fmt.Errorf("panic: %v", reason)
		}
	}()
	switch command {
	case "send":
		return o.send()
	case "push":
		return o.push()
	case "lite":
		return o.lite()
	case "transact":
		return o.transact()
	}
	return o.session(command)
}

func (o options) resolver() primitive.NsResolver {
	return primitive.NewPassthroughResolver([]string{o["ns"]})
}

func (o options) credentials() primitive.Credentials {
	return primitive.Credentials{AccessKey: o["ak"], SecretKey: o["sk"]}
}

func instance() string { return fmt.Sprintf("driver-%d", time.Now().UnixNano()) }

// ---- producing

func (o options) send() error {
	selector := producer.NewRoundRobinQueueSelector()
	if o.number("keyed", 0) > 0 {
		selector = producer.NewHashQueueSelector()
	}
	p, err := rocketmq.NewProducer(
		producer.WithQueueSelector(selector),
		producer.WithNsResolver(o.resolver()),
		producer.WithGroupName("go-driver-producer"),
		producer.WithCredentials(o.credentials()),
		producer.WithInstanceName(instance()),
		producer.WithSendMsgTimeout(10*time.Second),
		producer.WithRetry(2),
	)
	if err != nil {
		return err
	}
	if err := p.Start(); err != nil {
		return err
	}
	defer p.Shutdown()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	count := o.number("count", 1)
	switch o.text("mode", "sync") {
	case "sync":
		for i := 0; i < count; i++ {
			result, err := p.SendSync(ctx, o.message(i))
			if err != nil {
				return err
			}
			o.sent(i, result)
		}
	case "async":
		return o.sendAsync(ctx, p, count)
	case "oneway":
		for i := 0; i < count; i++ {
			if err := p.SendOneWay(ctx, o.message(i)); err != nil {
				return err
			}
			o.sent(i, nil)
		}
		time.Sleep(500 * time.Millisecond)
	case "batch":
		for i := 0; i < count; i += 10 {
			var batch []*primitive.Message
			for j := i; j < min(i+10, count); j++ {
				batch = append(batch, o.message(j))
			}
			result, err := p.SendSync(ctx, batch...)
			if err != nil {
				return err
			}
			for j := range batch {
				o.sent(i+j, result)
			}
		}
	}
	return nil
}

func (o options) sendAsync(ctx context.Context, p rocketmq.Producer, count int) error {
	var open sync.WaitGroup
	open.Add(count)
	for i := 0; i < count; i++ {
		number := i
		err := p.SendAsync(ctx, func(_ context.Context, result *primitive.SendResult, err error) {
			defer open.Done()
			if err != nil {
				emit("error", event{"error": err.Error()})
				return
			}
			o.sent(number, result)
		}, o.message(i))
		if err != nil {
			return err
		}
	}
	open.Wait()
	return nil
}

// message i: body PREFIX-i, the i-th tag of `tags` in turn, key k-i, properties n = i and parity.
func (o options) message(i int) *primitive.Message {
	tags := strings.Split(o.text("tags", "A"), ",")
	body := o.body(i)
	if missing := o.number("size", 0) - len(body); missing > 0 {
		body += strings.Repeat(".", missing)
	}
	message := primitive.NewMessage(o["topic"], []byte(body))
	message.WithTag(tags[i%len(tags)])
	message.WithKeys([]string{fmt.Sprintf("k-%d", i)})
	if keyed := o.number("keyed", 0); keyed > 0 {
		message.WithShardingKey(fmt.Sprintf("key-%d", i%keyed))
	}
	message.WithProperty("n", strconv.Itoa(i))
	message.WithProperty("parity", []string{"even", "odd"}[i%2])
	message.WithProperty("name", "h\u00e9\u4e2d")
	return message
}

func (o options) body(i int) string { return fmt.Sprintf("%s-%d", o.text("prefix", "m"), i) }

func (o options) sent(i int, result *primitive.SendResult) {
	members := event{"body": string(o.message(i).Body)}
	if result != nil {
		status := "FAILED"
		if result.Status == primitive.SendOK {
			status = "SEND_OK"
		}
		members["status"] = status
		members["msg_id"] = result.MsgID
		members["offset_msg_id"] = result.OffsetMsgID
		members["queue"] = result.MessageQueue.QueueId
		members["offset"] = result.QueueOffset
	}
	emit("sent", members)
}

// ---- consuming

func (o options) selector() consumer.MessageSelector {
	if sql, found := o["sql"]; found {
		return consumer.MessageSelector{Type: consumer.SQL92, Expression: sql}
	}
	return consumer.MessageSelector{Type: consumer.TAG, Expression: o.text("tag", "*")}
}

func (o options) consumerOptions() []consumer.Option {
	return []consumer.Option{
		consumer.WithNsResolver(o.resolver()),
		consumer.WithGroupName(o["group"]),
		consumer.WithCredentials(o.credentials()),
		consumer.WithInstance(instance()),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
	}
}

func (o options) push() error {
	instances, open, complete := o.number("instances", 1), new(int64), make(chan struct{})
	*open = int64(o.number("expect", 1))
	settings := o.consumerOptions()
	if o["model"] == "broadcasting" {
		*open *= int64(instances)
		settings = append(settings, consumer.WithConsumerModel(consumer.BroadCasting))
	}
	fail := o.number("fail", 0) // the first so many deliveries of each message fail
	_, orderly := o["orderly"]
	settings = append(settings, consumer.WithMaxReconsumeTimes(int32(o.number("max", -1))),
		consumer.WithConsumerOrder(orderly), consumer.WithSuspendCurrentQueueTimeMillis(50*time.Millisecond))
	for i := 0; i < instances; i++ {
		number := i
		c, err := rocketmq.NewPushConsumer(append(settings, consumer.WithInstance(instance()))...)
		if err != nil {
			return err
		}
		err = c.Subscribe(o["topic"], o.selector(), func(ctx context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
			for _, message := range messages {
				got(number, message)
				if atomic.AddInt64(open, -1) == 0 {
					close(complete)
				}
			}
			switch {
			case int(messages[0].ReconsumeTimes) >= fail:
				return consumer.ConsumeSuccess, nil
			case orderly:
				return consumer.SuspendCurrentQueueAMoment, nil
			}
			if retry, found := primitive.GetConcurrentlyCtx(ctx); found {
				retry.DelayLevelWhenNextConsume = o.number("level", 0)
			}
			return consumer.ConsumeRetryLater, nil
		})
		if err != nil {
			return err
		}
		if err := c.Start(); err != nil {
			return err
		}
		defer c.Shutdown()
	}
	if _, found := o["count"]; found { // produce once the consumers have shared the queues out
		time.Sleep(balance)
		if err := o.send(); err != nil {
			return err
		}
	}
	select {
	case <-complete:
	case <-time.After(time.Duration(o.number("timeout_s", 20)) * time.Second):
		emit("incomplete", event{"missing": atomic.LoadInt64(open)})
	}
	time.Sleep(settle)
	return nil
}

func (o options) lite() error {
	c, err := rocketmq.NewPullConsumer(o.consumerOptions()...)
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
	open, end := o.number("expect", 1), time.Now().Add(time.Duration(o.number("timeout_s", 20))*time.Second)
	for settled := false; time.Now().Before(end); {
		request, err := c.Poll(context.Background(), 100*time.Millisecond)
		if err == nil {
			for _, message := range request.GetMsgList() {
				got(0, message)
				open--
			}
			c.ACK(context.Background(), request, consumer.ConsumeSuccess)
		}
		if open <= 0 && !settled {
			settled, end = true, time.Now().Add(settle)
		}
	}
	if open > 0 {
		emit("incomplete", event{"missing": open})
	}
	return nil
}

func got(number int, message *primitive.MessageExt) {
	emit("got", event{
		"consumer": number, "topic": message.Topic, "body": string(message.Body), "tag": message.GetTags(),
		"keys": message.GetKeys(), "properties": message.GetProperties(), "msg_id": message.MsgId,
		"queue": message.Queue.QueueId, "offset": message.QueueOffset, "reconsumed": message.ReconsumeTimes,
	})
}
