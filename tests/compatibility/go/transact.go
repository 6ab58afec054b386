package main

import (
	"context"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

// ledger: the local transaction of message i ends as the i-th of `outcomes` says, its check as the i-th of `checks`.
type ledger struct {
	o        options
	open     int64
	complete chan struct{}
}

func (l *ledger) ending(name, number string) primitive.LocalTransactionState {
	words := strings.Split(l.o.text(name, "commit"), ",")
	i, _ := strconv.Atoi(number)
	switch words[i%len(words)] {
	case "commit":
		return primitive.CommitMessageState
	case "rollback":
		return primitive.RollbackMessageState
	}
	return primitive.UnknowState
}

func (l *ledger) ExecuteLocalTransaction(message *primitive.Message) primitive.LocalTransactionState {
	return l.ending("outcomes", message.GetProperty("n"))
}

func (l *ledger) CheckLocalTransaction(message *primitive.MessageExt) primitive.LocalTransactionState {
	emit("checked", event{"body": string(message.Body), "topic": message.Topic, "msg_id": message.TransactionId})
	if atomic.AddInt64(&l.open, -1) == 0 {
		close(l.complete)
	}
	return l.ending("checks", message.GetProperty("n"))
}

func (o options) transact() error {
	l := &ledger{o: o, open: int64(o.number("expect", 0)), complete: make(chan struct{})}
	if l.open == 0 {
		close(l.complete)
	}
	p, err := rocketmq.NewTransactionProducer(l,
		producer.WithNsResolver(o.resolver()),
		producer.WithGroupName(o["group"]),
		producer.WithInstanceName(instance()),
		producer.WithSendMsgTimeout(10*time.Second),
	)
	if err != nil {
		return err
	}
	if err := p.Start(); err != nil {
		return err
	}
	defer p.Shutdown()
	for i := 0; i < o.number("count", 1); i++ {
		result, err := p.SendMessageInTransaction(context.Background(), o.message(i))
		if err != nil {
			return err
		}
		o.sent(i, result.SendResult)
	}
	select {
	case <-l.complete:
	case <-time.After(time.Duration(o.number("timeout_s", 20)) * time.Second):
		emit("incomplete", event{"missing": atomic.LoadInt64(&l.open)})
	}
	time.Sleep(settle)
	return nil
}
