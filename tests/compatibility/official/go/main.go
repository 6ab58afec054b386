// Drives the unmodified Go client that speaks gRPC; the words are described in peer/official.py.
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
	"time"

	rocketmq "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
)

const settle = 400 * time.Millisecond // how long a surplus message may still show up

var (
	output    sync.Mutex
	consumers = map[string]rocketmq.SimpleConsumer{}
	received  = map[string]*rocketmq.MessageView{}
	closers   = map[string]func() error{}
)

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

func (o options) seconds(key string, otherwise int) time.Duration {
	return time.Duration(o.number(key, otherwise)) * time.Second
}

func main() {
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

func (o options) run(command string) error {
	switch command {
	case "send":
		return o.send()
	case "recall":
		return o.recall()
	case "transact":
		return o.transact()
	case "open":
		return o.open()
	case "receive":
		return o.receive()
	case "ack":
		return o.ack()
	case "hide":
		view := received[o["name"]+o["body"]]
		return consumers[o["name"]].ChangeInvisibleDuration(view, o.seconds("hide_s", 30))
	case "close":
		return closers[o["name"]]()
	case "push":
		return o.push()
	}
	return fmt.Errorf("no such command: %s", command)
}

func (o options) configuration() *rocketmq.Config {
	return &rocketmq.Config{
		Endpoint:      o["ep"],
		ConsumerGroup: o["group"],
		Credentials:   &credentials.SessionCredentials{AccessKey: o["ak"], AccessSecret: o["sk"]},
	}
}

// ---- producing

func (o options) producer(more ...rocketmq.ProducerOption) (rocketmq.Producer, error) {
	producer, err := rocketmq.NewProducer(o.configuration(), append(more, rocketmq.WithTopics(o["topic"]))...)
	if err != nil {
		return nil, err
	}
	return producer, producer.Start()
}

func (o options) send() error {
	producer, err := o.producer()
	if err != nil {
		return err
	}
	defer producer.GracefulStop()
	for i := 0; i < o.number("count", 1); i++ {
		message := o.message(i)
		receipts, err := producer.Send(context.Background(), message)
		if err != nil {
			return err
		}
		sent(message, receipts)
	}
	return nil
}

func (o options) message(i int) *rocketmq.Message {
	body := fmt.Sprintf("%s-%d", o.text("prefix", "m"), i)
	message := &rocketmq.Message{Topic: o["topic"], Body: []byte(body)}
	message.SetKeys(body)
	message.AddProperty("n", strconv.Itoa(i))
	if tags := o["tags"]; tags != "" {
		words := strings.Split(tags, ",")
		message.SetTag(words[i%len(words)])
	}
	if groups := o.number("keyed", 0); groups > 0 {
		message.SetMessageGroup(fmt.Sprintf("group-%d", i%groups))
	}
	if delay := o.number("delay_ms", 0); delay > 0 {
		message.SetDelayTimestamp(time.Now().Add(time.Duration(delay) * time.Millisecond))
	}
	return message
}

func sent(message *rocketmq.Message, receipts []*rocketmq.SendReceipt) {
	for _, receipt := range receipts {
		emit("sent", event{
			"body": string(message.Body), "id": receipt.MessageID, "handle": receipt.RecallHandle,
			"ms": time.Now().UnixMilli(),
		})
	}
}

func (o options) recall() error {
	producer, err := o.producer()
	if err != nil {
		return err
	}
	defer producer.GracefulStop()
	id, err := producer.Recall(context.Background(), o["topic"], o["handle"])
	if err == nil {
		emit("recalled", event{"id": id})
	}
	return err
}

func (o options) transact() error {
	checks := make(chan bool, 1000)
	producer, err := o.producer(rocketmq.WithTransactionChecker(&rocketmq.TransactionChecker{
		Check: func(view *rocketmq.MessageView) rocketmq.TransactionResolution {
			emit("checked", event{"body": string(view.GetBody()), "id": view.GetMessageId()})
			checks <- true
			i, _ := strconv.Atoi(view.GetProperties()["n"])
			return map[string]rocketmq.TransactionResolution{
				"commit": rocketmq.COMMIT, "rollback": rocketmq.ROLLBACK,
			}[o.ending("checks", i)]
		},
	}))
	if err != nil {
		return err
	}
	defer producer.GracefulStop()
	for i := 0; i < o.number("count", 1); i++ {
		message := o.message(i)
		transaction := producer.BeginTransaction()
		receipts, err := producer.SendWithTransaction(context.Background(), message, transaction)
		if err != nil {
			return err
		}
		sent(message, receipts)
		switch o.ending("outcomes", i) {
		case "commit":
			err = transaction.Commit()
		case "rollback":
			err = transaction.RollBack()
		}
		if err != nil {
			return err
		}
	}
	o.await(checks, o.number("expect", 0))
	return nil
}

func (o options) ending(option string, i int) string {
	words := strings.Split(o.text(option, "commit"), ",")
	return words[i%len(words)]
}

func (o options) await(events <-chan bool, missing int) {
	end := time.After(o.seconds("timeout_s", 20))
	for missing > 0 {
		select {
		case <-events:
			missing--
		case <-end:
			emit("incomplete", event{"missing": missing})
			return
		}
	}
	time.Sleep(settle)
}

// ---- the simple consumer

func (o options) open() error {
	consumer, err := rocketmq.NewSimpleConsumer(o.configuration(),
		rocketmq.WithSimpleAwaitDuration(o.seconds("await_s", 5)),
		rocketmq.WithSimpleSubscriptionExpressions(o.subscription()),
	)
	if err != nil {
		return err
	}
	consumers[o["name"]] = consumer
	closers[o["name"]] = consumer.GracefulStop
	return consumer.Start()
}

func (o options) subscription() map[string]*rocketmq.FilterExpression {
	expression := rocketmq.NewFilterExpression(o.text("tag", "*"))
	if sql, found := o["sql"]; found {
		expression = rocketmq.NewFilterExpressionWithType(sql, rocketmq.SQL92)
	}
	return map[string]*rocketmq.FilterExpression{o["topic"]: expression}
}

func (o options) receive() error {
	batch := int32(o.number("batch", 32))
	views, err := consumers[o["name"]].Receive(context.Background(), batch, o.seconds("hide_s", 30))
	if status, found := err.(*rocketmq.ErrRpcStatus); found && status.Code == 40401 {
		return nil // this client says so when there is none
	}
	for _, view := range views {
		received[o["name"]+string(view.GetBody())] = view
		got(view)
	}
	return err
}

func (o options) ack() error {
	for _, body := range strings.Split(o["bodies"], ",") {
		if err := consumers[o["name"]].Ack(context.Background(), received[o["name"]+body]); err != nil {
			return err
		}
	}
	return nil
}

// ---- the push consumer

func (o options) push() error {
	deliveries, counting := map[string]int{}, sync.Mutex{}
	events := make(chan bool, 1000)
	consumer, err := rocketmq.NewPushConsumer(o.configuration(),
		rocketmq.WithPushAwaitDuration(5*time.Second),
		rocketmq.WithPushSubscriptionExpressions(o.subscription()),
		rocketmq.WithPushMessageListener(&rocketmq.FuncMessageListener{
			Consume: func(view *rocketmq.MessageView) rocketmq.ConsumerResult {
				got(view)
				events <- true
				counting.Lock()
				defer counting.Unlock()
				deliveries[string(view.GetBody())]++
				if deliveries[string(view.GetBody())] > o.number("fail", 0) {
					return rocketmq.SUCCESS
				}
				return rocketmq.FAILURE
			},
		}),
	)
	if err != nil {
		return err
	}
	if err := consumer.Start(); err != nil {
		return err
	}
	closers[o["name"]] = func() error {
		go consumer.GracefulStop() // it waits for its long polls
		return nil
	}
	o.await(events, o.number("expect", 1))
	return nil
}

func got(view *rocketmq.MessageView) {
	emit("got", event{
		"body": string(view.GetBody()), "id": view.GetMessageId(), "topic": view.GetTopic(),
		"attempt": view.GetDeliveryAttempt(), "tag": view.GetTag(), "key": strings.Join(view.GetKeys(), " "),
		"n": view.GetProperties()["n"], "group": view.GetMessageGroup(), "ms": time.Now().UnixMilli(),
	})
}
