import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.Consumer;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.RPCHook;

/**
 * Drives the unmodified Java client for the compatibility tests.
 *
 * <p>One JVM serves many scenarios: a line on stdin is {@code COMMAND key=value ...} (values URL-encoded), the answer
 * is JSON lines on stdout, the last of them {@code {"event": "done"}} or {@code {"event": "failed", "error": ...}}.
 * What differs between the 4.9 and the 5.3 client (the package of one enum; mqadmin) is reached by reflection, so the
 * same source compiles against both.
 */
public final class Driver {
    private static final PrintStream OUT = System.out;
    private static final long SETTLE_MS = 400; // how long a surplus message may still show up
    private static final long BALANCE_MS = 2500; // two starts, a notice and a rebalance each

    private final Map<String, String> options = new HashMap<>();

    private Driver(String[] words) throws Exception {
        for (int i = 1; i < words.length; i++) {
            int equals = words[i].indexOf('=');
            options.put(words[i].substring(0, equals), URLDecoder.decode(words[i].substring(equals + 1), "UTF-8"));
        }
    }

    public static void main(String[] arguments) throws Exception {
        System.setOut(System.err); // log lines of libraries must not mix with the answers
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.trim().split(" ");
            try {
                new Driver(words).run(words[0]);
                emit("done");
            } catch (Throwable error) {
                emit("failed", "error", String.valueOf(error));
            }
        }
        System.exit(0); // client threads are not daemons
    }

    private void run(String command) throws Exception {
        switch (command) {
            case "send": send(); break;
            case "push": push(); break;
            case "transact": transact(); break;
            case "lite": lite(); break;
            case "admin": admin(); break;
            default: throw new IllegalArgumentException(command);
        }
    }

    // ---- producing

    /** What signs requests with {@code ak} and {@code sk}; it lies in a jar of its own before 5.3. */
    private RPCHook hook() throws Exception {
        if (!options.containsKey("ak")) return null;
        String acl = "org.apache.rocketmq.acl.common.";
        Class<?> credentials = Class.forName(acl + "SessionCredentials");
        Object pair = credentials.getConstructor(String.class, String.class).newInstance(options.get("ak"), options.get("sk"));
        return (RPCHook) Class.forName(acl + "AclClientRPCHook").getConstructor(credentials).newInstance(pair);
    }

    private void send() throws Exception {
        DefaultMQProducer producer = configured(new DefaultMQProducer("driver-producer", hook()));
        producer.setSendMsgTimeout(10_000);
        producer.start();
        Thread.sleep(number("settle_ms", 0));
        try {
            send(producer, text("mode", "sync"));
        } finally {
            producer.shutdown();
        }
    }

    private void send(DefaultMQProducer producer, String mode) throws Exception {
        int count = number("count", 1);
        switch (mode) {
            case "sync":
                for (int i = 0; i < count; i++) {
                    sent(message(i), sendOne(producer, i));
                    Thread.sleep(number("pause_ms", 0));
                }
                break;
            case "async":
                sendAsync(producer, count);
                break;
            case "oneway":
                for (int i = 0; i < count; i++) {
                    producer.sendOneway(message(i));
                    sent(message(i), null);
                }
                Thread.sleep(500); // nothing tells when a one-way frame has left
                break;
            case "batch":
                for (int i = 0; i < count; i += 10) {
                    List<Message> batch = new ArrayList<>();
                    for (int j = i; j < Math.min(i + 10, count); j++) batch.add(message(j));
                    SendResult result = producer.send(batch);
                    for (Message one : batch) sent(one, result);
                }
                break;
            default:
                throw new IllegalArgumentException(mode);
        }
    }

    /** With `keyed`: the queue by the hash of key-(i modulo keyed). */
    private SendResult sendOne(DefaultMQProducer producer, int i) throws Exception {
        int keyed = number("keyed", 0);
        if (keyed == 0) return producer.send(message(i));
        return producer.send(message(i), new SelectMessageQueueByHash(), "key-" + i % keyed);
    }

    private void sendAsync(DefaultMQProducer producer, int count) throws Exception {
        CountDownLatch open = new CountDownLatch(count);
        for (int i = 0; i < count; i++) {
            Message message = message(i);
            producer.send(message, new SendCallback() {
                @Override public void onSuccess(SendResult result) {
                    sent(message, result);
                    open.countDown();
                }

                @Override public void onException(Throwable error) {
                    emit("error", "error", String.valueOf(error));
                    open.countDown();
                }
            });
        }
        if (!open.await(20, TimeUnit.SECONDS)) throw new IllegalStateException(open.getCount() + " sends unanswered");
    }

    /** Message i: body PREFIX-i, the i-th tag of `tags` in turn, key k-i, properties n = i and parity. */
    private Message message(int i) {
        String[] tags = text("tags", "A").split(",");
        byte[] body = (text("prefix", "m") + "-" + i).getBytes(StandardCharsets.UTF_8);
        int size = number("size", 0);
        if (body.length < size) {
            int length = body.length;
            body = Arrays.copyOf(body, size);
            Arrays.fill(body, length, size, (byte) '.');
        }
        Message message = new Message(options.get("topic"), tags[i % tags.length], "k-" + i, body);
        message.putUserProperty("n", String.valueOf(i));
        message.putUserProperty("parity", i % 2 == 0 ? "even" : "odd");
        message.putUserProperty("name", "h\u00e9\u4e2d");
        return message;
    }

    private static void sent(Message message, SendResult result) {
        String body = new String(message.getBody(), StandardCharsets.UTF_8);
        if (result == null) {
            emit("sent", "body", body);
        } else {
            emit("sent", "body", body, "status", result.getSendStatus(), "msg_id", result.getMsgId(),
                "offset_msg_id", result.getOffsetMsgId(), "queue", result.getMessageQueue().getQueueId(),
                "offset", result.getQueueOffset());
        }
    }

    // ---- transactions

    /** The local transaction of message i ends as the i-th of `outcomes` says, its check as the i-th of `checks`. */
    private void transact() throws Exception {
        TransactionMQProducer producer = configured(new TransactionMQProducer(options.get("group")));
        CountDownLatch open = new CountDownLatch(number("expect", 0));
        producer.setTransactionListener(new TransactionListener() {
            @Override public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return ending("outcomes", message);
            }

            @Override public LocalTransactionState checkLocalTransaction(MessageExt message) {
                emit("checked", "body", new String(message.getBody(), StandardCharsets.UTF_8),
                    "topic", message.getTopic(), "msg_id", message.getTransactionId());
                open.countDown();
                return ending("checks", message);
            }
        });
        producer.setSendMsgTimeout(10_000);
        DefaultMQProducer mute = configured(new DefaultMQProducer(options.get("group")));
        try {
            if (options.containsKey("mute")) { // a member of the group that answers no checks
                mute.start();
                mute.send(new Message(options.get("topic"), "A", "mute", "mute".getBytes(StandardCharsets.UTF_8)));
            }
            producer.start();
            for (int i = 0; i < number("count", 1); i++) {
                sent(message(i), producer.sendMessageInTransaction(message(i), null));
            }
            if (!open.await(number("timeout_s", 20), TimeUnit.SECONDS)) emit("incomplete", "missing", open.getCount());
            Thread.sleep(SETTLE_MS);
        } finally {
            producer.shutdown();
            mute.shutdown();
        }
    }

    private LocalTransactionState ending(String name, Message message) {
        String[] words = text(name, "commit").split(",");
        switch (words[Integer.parseInt(message.getUserProperty("n")) % words.length]) {
            case "commit": return LocalTransactionState.COMMIT_MESSAGE;
            case "rollback": return LocalTransactionState.ROLLBACK_MESSAGE;
            default: return LocalTransactionState.UNKNOW;
        }
    }

    // ---- consuming

    private void push() throws Exception {
        int instances = number("instances", 1);
        boolean broadcasting = "broadcasting".equals(options.get("model"));
        AtomicInteger open = new AtomicInteger(number("expect", 1) * (broadcasting ? instances : 1));
        CountDownLatch complete = new CountDownLatch(1);
        Set<String> seen = ConcurrentHashMap.newKeySet();
        List<DefaultMQPushConsumer> consumers = new ArrayList<>();
        for (int i = 0; i < instances; i++) {
            final int consumer = i;
            consumers.add(pushConsumer(broadcasting));
            listen(consumers.get(i), message -> {
                got(consumer, message);
                boolean counts = !options.containsKey("distinct")
                    || seen.add(new String(message.getBody(), StandardCharsets.UTF_8));
                if (counts && open.decrementAndGet() == 0) complete.countDown();
            });
        }
        try {
            for (DefaultMQPushConsumer consumer : consumers) consumer.start();
            if (options.containsKey("count")) { // produce once the consumers have shared the queues out
                Thread.sleep(BALANCE_MS);
                send();
            }
            boolean all = complete.await(number("timeout_s", 20), TimeUnit.SECONDS);
            Thread.sleep(SETTLE_MS);
            if (!all) emit("incomplete", "missing", open.get());
        } finally {
            for (DefaultMQPushConsumer consumer : consumers) consumer.shutdown();
        }
    }

    /** The first `fail` deliveries of each message fail: they come again, after `level` or after a rest. */
    private void listen(DefaultMQPushConsumer consumer, Consumer<MessageExt> take) {
        int fail = number("fail", 0);
        consumer.setMaxReconsumeTimes(number("max", -1));
        consumer.setSuspendCurrentQueueTimeMillis(50);
        if (options.containsKey("orderly")) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                messages.forEach(take);
                return messages.get(0).getReconsumeTimes() < fail
                    ? ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT : ConsumeOrderlyStatus.SUCCESS;
            });
            return;
        }
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(take);
            context.setDelayLevelWhenNextConsume(number("level", 0));
            return messages.get(0).getReconsumeTimes() < fail
                ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
    }

    private DefaultMQPushConsumer pushConsumer(boolean broadcasting) throws Exception {
        DefaultMQPushConsumer consumer = configured(new DefaultMQPushConsumer(options.get("group"), hook(), new AllocateMessageQueueAveragely()));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeThreadMin(2);
        consumer.setConsumeThreadMax(2);
        if (broadcasting) useBroadcasting(consumer);
        String topic = options.get("topic");
        if (options.containsKey("sql")) {
            consumer.subscribe(topic, MessageSelector.bySql(options.get("sql")));
        } else {
            consumer.subscribe(topic, text("tag", "*"));
        }
        return consumer;
    }

    /** The enum lies in another package in each line of the client. */
    @SuppressWarnings({"unchecked", "rawtypes"})
    private static void useBroadcasting(DefaultMQPushConsumer consumer) throws Exception {
        for (java.lang.reflect.Method method : DefaultMQPushConsumer.class.getMethods()) {
            if (method.getName().equals("setMessageModel")) {
                method.invoke(consumer, Enum.valueOf((Class) method.getParameterTypes()[0], "BROADCASTING"));
            }
        }
    }

    private void lite() throws Exception {
        DefaultLitePullConsumer consumer = configured(new DefaultLitePullConsumer(options.get("group")));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAutoCommit(false);
        boolean assign = "assign".equals(options.get("mode"));
        String topic = options.get("topic");
        if (!assign && options.containsKey("sql")) {
            consumer.subscribe(topic, MessageSelector.bySql(options.get("sql")));
        } else if (!assign) {
            consumer.subscribe(topic, text("tag", "*"));
        }
        consumer.start();
        try {
            Collection<MessageQueue> queues = new ArrayList<>();
            if (assign) {
                queues = consumer.fetchMessageQueues(topic);
                consumer.assign(queues);
                for (MessageQueue queue : queues) consumer.seekToBegin(queue);
            }
            poll(consumer);
            consumer.commitSync();
            for (MessageQueue queue : queues) {
                emit("committed", "queue", queue.getQueueId(), "offset", consumer.committed(queue));
            }
        } finally {
            consumer.shutdown();
        }
    }

    private void poll(DefaultLitePullConsumer consumer) {
        int open = number("expect", 1);
        long end = System.nanoTime() + number("timeout_s", 20) * 1_000_000_000L;
        long settled = Long.MAX_VALUE;
        while (System.nanoTime() < Math.min(end, settled)) {
            for (MessageExt message : consumer.poll(100)) {
                got(0, message);
                open--;
            }
            if (open <= 0 && settled == Long.MAX_VALUE) settled = System.nanoTime() + SETTLE_MS * 1_000_000L;
        }
        if (open > 0) emit("incomplete", "missing", open);
    }

    private static void got(int consumer, MessageExt message) {
        emit("got", "consumer", consumer, "topic", message.getTopic(),
            "body", new String(message.getBody(), StandardCharsets.UTF_8), "tag", message.getTags(),
            "keys", message.getKeys(), "properties", new TreeMap<>(message.getProperties()),
            "msg_id", message.getMsgId(), "queue", message.getQueueId(), "offset", message.getQueueOffset(),
            "reconsumed", message.getReconsumeTimes());
    }

    // ---- mqadmin, where rocketmq-tools is on the class path

    private void admin() throws Exception {
        String[] words = options.get("words").split("\n");
        ByteArrayOutputStream printed = new ByteArrayOutputStream();
        PrintStream before = System.out; // stderr, see main
        PrintStream capture = new PrintStream(printed, true, "UTF-8");
        System.setOut(capture);
        System.setErr(capture);
        try {
            System.setProperty("rocketmq.namesrv.addr", options.get("ns"));
            Class<?> start = Class.forName("org.apache.rocketmq.tools.command.MQAdminStartup");
            start.getMethod("main", String[].class).invoke(null, (Object) words);
        } finally {
            System.setOut(before);
            System.setErr(before);
        }
        emit("printed", "text", printed.toString("UTF-8"));
    }

    // ---- odds and ends

    private <T extends ClientConfig> T configured(T client) {
        client.setNamesrvAddr(options.get("ns"));
        client.setClientIP("127.0.0.1");
        client.setInstanceName("driver-" + System.nanoTime());
        // A 5.3 consumer now and then pulls before the heartbeat with its newest subscription has left, and is refused
        // (25) until the next one, 30 s later. It does so with the real broker as well: about once in 25 starts.
        client.setHeartbeatBrokerInterval(2_000);
        client.setPollNameServerInterval(number("poll_ms", 2_000)); // else a topic that is made later is seen after up to 30 s
        if (options.containsKey("trace")) enableTrace(client);
        return client;
    }

    /** Clients of 5.3 have it here; those of 4.9 in their constructors alone. */
    private static void enableTrace(ClientConfig client) {
        try {
            client.getClass().getMethod("setEnableTrace", boolean.class).invoke(client, true);
        } catch (ReflectiveOperationException error) {
            throw new IllegalStateException("this client cannot be told to trace", error);
        }
    }

    private String text(String key, String otherwise) {
        return options.getOrDefault(key, otherwise);
    }

    private int number(String key, int otherwise) {
        return Integer.parseInt(text(key, String.valueOf(otherwise)));
    }

    private static void emit(String event, Object... pairs) {
        StringBuilder line = new StringBuilder("{\"event\": ").append(json(event));
        for (int i = 0; i < pairs.length; i += 2) {
            line.append(", ").append(json(pairs[i])).append(": ").append(json(pairs[i + 1]));
        }
        synchronized (OUT) {
            OUT.println(line.append('}'));
            OUT.flush();
        }
    }

    private static String json(Object value) {
        if (value == null || value instanceof Number || value instanceof Boolean) return String.valueOf(value);
        if (value instanceof Map) {
            List<String> members = new ArrayList<>();
            ((Map<?, ?>) value).forEach((key, one) -> members.add(json(key) + ": " + json(one)));
            return "{" + String.join(", ", members) + "}";
        }
        StringBuilder text = new StringBuilder("\"");
        for (char letter : String.valueOf(value).toCharArray()) {
            boolean plain = letter >= ' ' && letter < 127 && letter != '"' && letter != '\\';
            text.append(plain ? String.valueOf(letter) : String.format("\\u%04x", (int) letter));
        }
        return text.append('"').toString();
    }
}
