import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.text.SimpleDateFormat;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Date;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Consumers of the unmodified Java client that stay open from command to command, and timed messages.
 *
 * <p>The words are those of consuming_driver.py. What 4.9 does not have is reached by reflection, so the same source
 * compiles against both clients.
 */
public final class Consuming {
    private static final PrintStream OUT = System.out;
    private static final Map<String, DefaultMQProducer> PRODUCERS = new HashMap<>();
    private static final Map<String, Session> SESSIONS = new HashMap<>();

    private final Map<String, String> options = new HashMap<>();

    /** One open consumer; `got` has what its listener took. */
    private static final class Session {
        private final BlockingQueue<Object[]> got = new LinkedBlockingQueue<>();
        private final AtomicInteger calls = new AtomicInteger();
        private DefaultMQPushConsumer push;
        private DefaultLitePullConsumer lite;

        void take(int call, List<MessageExt> messages) {
            for (MessageExt message : messages) got.add(new Object[] {call, message, System.currentTimeMillis()});
        }
    }

    private Consuming(String[] words) throws Exception {
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
                new Consuming(words).run(words[0]);
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
            case "recall": recall(); break;
            case "query": query(); break;
            case "open": open(); break;
            case "pull": pull(); break;
            case "take": take(); break;
            case "change": session().push.subscribe(options.get("topic"), text("tag", "*")); break;
            case "close": close(SESSIONS.remove(options.get("name"))); break;
            default: lite(command);
        }
    }

    // ---- producing

    private DefaultMQProducer producer() throws Exception {
        DefaultMQProducer producer = PRODUCERS.get(options.get("ns"));
        if (producer == null) {
            producer = configured(new DefaultMQProducer("consuming-producer"));
            producer.setSendMsgTimeout(10_000);
            producer.start();
            PRODUCERS.put(options.get("ns"), producer);
        }
        return producer;
    }

    private void send() throws Exception {
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < number("count", 1); i++) messages.add(message(i));
        try {
            if ("batch".equals(options.get("mode"))) {
                sent(messages.get(0), producer().send(messages), 0);
                return;
            }
            for (Message message : messages) {
                long now = System.currentTimeMillis();
                sent(message, producer().send(message), now);
            }
        } catch (Exception error) {
            emit("refused", "error", String.valueOf(error));
        }
    }

    private Message message(int i) throws Exception {
        byte[] body = (text("prefix", "m") + "-" + i).getBytes(StandardCharsets.UTF_8);
        Message message = new Message(options.get("topic"), turn("tags", i, "A"), text("prefix", "m") + "-k-" + i, body);
        message.putUserProperty("n", String.valueOf(i));
        if (options.containsKey("levels")) message.setDelayTimeLevel(Integer.parseInt(turn("levels", i, "0")));
        if (options.containsKey("delays_ms")) timed(message, "setDelayTimeMs", Long.parseLong(turn("delays_ms", i, "0")));
        if (options.containsKey("times_ms")) timed(message, "setDeliverTimeMs", Long.parseLong(turn("times_ms", i, "0")));
        return message;
    }

    private static void timed(Message message, String setter, long value) throws Exception {
        Message.class.getMethod(setter, long.class).invoke(message, value);
    }

    private static void sent(Message message, SendResult result, long now) {
        emit("sent", "body", new String(message.getBody(), StandardCharsets.UTF_8), "status", result.getSendStatus(),
            "msg_id", result.getMsgId(), "queue", result.getMessageQueue().getQueueId(),
            "offset", result.getQueueOffset(), "handle", handle(result), "at_ms", now);
    }

    private static Object handle(SendResult result) {
        try {
            return SendResult.class.getMethod("getRecallHandle").invoke(result);
        } catch (ReflectiveOperationException error) {
            return null; // 4.9 has none
        }
    }

    private void recall() throws Exception {
        try {
            Object id = DefaultMQProducer.class.getMethod("recallMessage", String.class, String.class)
                .invoke(producer(), options.get("topic"), options.get("handle"));
            emit("recalled", "msg_id", id);
        } catch (java.lang.reflect.InvocationTargetException error) {
            emit("refused", "error", String.valueOf(error.getCause()));
        }
    }

    /** The bodies of a key; the index may lag, so it is asked until `expect` are there. */
    private void query() throws Exception {
        long end = System.currentTimeMillis() + number("timeout_s", 10) * 1000L;
        List<MessageExt> found = Collections.emptyList();
        while (found.size() < number("expect", 1) && System.currentTimeMillis() < end) {
            try {
                long now = System.currentTimeMillis();
                found = producer().queryMessage(options.get("topic"), options.get("key"), 32, now - 600_000, now + 60_000)
                    .getMessageList();
            } catch (org.apache.rocketmq.client.exception.MQClientException none) {
                Thread.sleep(100);
            }
        }
        for (MessageExt message : found) {
            emit("found", "body", new String(message.getBody(), StandardCharsets.UTF_8), "topic", message.getTopic());
        }
    }

    // ---- consumers

    private Session session() {
        Session session = SESSIONS.get(options.get("name"));
        if (session == null) throw new IllegalStateException("no consumer " + options.get("name"));
        return session;
    }

    private void open() throws Exception {
        Session session = new Session();
        if ("lite".equals(options.get("kind"))) openLite(session);
        else openPush(session);
        SESSIONS.put(options.get("name"), session);
    }

    private void openPush(Session session) throws Exception {
        DefaultMQPushConsumer consumer = configured(new DefaultMQPushConsumer(options.get("group")));
        session.push = consumer;
        begin(text("from", "first"), consumer);
        consumer.setConsumeThreadMin(2);
        consumer.setConsumeThreadMax(2);
        consumer.setConsumeMessageBatchMaxSize(number("batch", 1));
        consumer.setPullBatchSize(number("pull_count", 32));
        consumer.setPullThresholdForQueue(number("count_max", 1000));
        consumer.setPullThresholdSizeForQueue(number("size_max_mib", 100));
        consumer.setPullThresholdForTopic(number("topic_count_max", -1));
        consumer.setConsumeConcurrentlyMaxSpan(number("span_max", 2000));
        if ("broadcasting".equals(options.get("model"))) useBroadcasting(consumer);
        if (options.containsKey("sql")) {
            consumer.subscribe(options.get("topic"), MessageSelector.bySql(options.get("sql")));
        } else {
            consumer.subscribe(options.get("topic"), text("tag", "*"));
        }
        long hold = number("hold_ms", 0);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            session.take(session.calls.incrementAndGet(), messages);
            if (hold > 0) sleep(hold);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
    }

    /** `where`: first, last, or milliseconds since 1970, of which this client takes the seconds. */
    private static void begin(String where, DefaultMQPushConsumer consumer) {
        if (where.equals("first")) {
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        } else if (where.equals("last")) {
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET);
        } else {
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_TIMESTAMP);
            consumer.setConsumeTimestamp(new SimpleDateFormat("yyyyMMddHHmmss").format(new Date(Long.parseLong(where))));
        }
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

    private void openLite(Session session) throws Exception {
        DefaultLitePullConsumer consumer = configured(new DefaultLitePullConsumer(options.get("group")));
        session.lite = consumer;
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAutoCommit(options.containsKey("auto"));
        consumer.setAutoCommitIntervalMillis(1_000); // less is not taken
        if (!options.containsKey("assign")) consumer.subscribe(options.get("topic"), text("tag", "*"));
        consumer.start();
        if (options.containsKey("assign")) consumer.assign(consumer.fetchMessageQueues(options.get("topic")));
    }

    /** One pull of queue 0 at each of `offsets`, by a consumer that keeps no offsets. */
    private void pull() throws Exception {
        DefaultMQPullConsumer consumer = configured(new DefaultMQPullConsumer(options.get("group")));
        consumer.start();
        try {
            MessageQueue queue = consumer.fetchSubscribeMessageQueues(options.get("topic")).stream()
                .filter(one -> one.getQueueId() == 0).findFirst().get();
            for (String offset : options.get("offsets").split(",")) {
                PullResult result = consumer.pull(queue, text("tag", "*"), Long.parseLong(offset), 32);
                List<String> bodies = new ArrayList<>();
                if (result.getMsgFoundList() != null) {
                    for (MessageExt message : result.getMsgFoundList()) bodies.add(new String(message.getBody()));
                }
                emit("pulled", "status", result.getPullStatus(), "next", result.getNextBeginOffset(),
                    "bodies", String.join(",", bodies));
            }
        } finally {
            consumer.shutdown();
        }
    }

    private void close(Session session) {
        if (session.push != null) session.push.shutdown();
        if (session.lite != null) session.lite.shutdown();
    }

    /** What the consumers `names` get until they have `expect` in all, and for `settle_ms` more. */
    private void take() throws Exception {
        int open = number("expect", 0);
        long end = System.currentTimeMillis() + number("timeout_s", 20) * 1000L;
        long settled = open > 0 ? Long.MAX_VALUE : System.currentTimeMillis() + number("settle_ms", 400);
        while (System.currentTimeMillis() < Math.min(end, settled)) {
            for (String name : options.get("names").split(",")) open -= taken(name, SESSIONS.get(name));
            if (open <= 0 && settled == Long.MAX_VALUE) settled = System.currentTimeMillis() + number("settle_ms", 400);
        }
        if (open > 0) emit("incomplete", "missing", open);
    }

    private static int taken(String name, Session session) throws Exception {
        if (session.lite != null) {
            List<MessageExt> polled = session.lite.poll(50);
            if (!polled.isEmpty()) session.take(session.calls.incrementAndGet(), polled);
        }
        int count = 0;
        for (Object[] one = session.got.poll(20, TimeUnit.MILLISECONDS); one != null; one = session.got.poll()) {
            MessageExt message = (MessageExt) one[1];
            emit("got", "consumer", name, "call", one[0], "at_ms", one[2], "topic", message.getTopic(),
                "body", new String(message.getBody(), StandardCharsets.UTF_8), "tag", message.getTags(),
                "properties", new TreeMap<>(message.getProperties()), "msg_id", message.getMsgId(),
                "queue", message.getQueueId(), "offset", message.getQueueOffset());
            count++;
        }
        return count;
    }

    /** Commits of a push consumer go out every 5 s, the first after 10 s; this one goes now. */
    private void lite(String command) throws Exception {
        Session session = session();
        if (command.equals("commit") && session.push != null) {
            session.push.getDefaultMQPushConsumerImpl().persistConsumerOffset();
            return;
        }
        DefaultLitePullConsumer consumer = session.lite;
        List<MessageQueue> queues = chosen(consumer);
        switch (command) {
            case "commit": consumer.commitSync(); break;
            case "pause": consumer.pause(queues); break;
            case "resume": consumer.resume(queues); break;
            default:
                for (MessageQueue queue : queues) queueCommand(command, consumer, queue);
        }
    }

    private void queueCommand(String command, DefaultLitePullConsumer consumer, MessageQueue queue) throws Exception {
        switch (command) {
            case "seek": consumer.seek(queue, number("offset", 0)); break;
            case "begin": consumer.seekToBegin(queue); break;
            case "end": consumer.seekToEnd(queue); break;
            case "committed": emit("offset", "queue", queue.getQueueId(), "offset", consumer.committed(queue)); break;
            case "at":
                emit("offset", "queue", queue.getQueueId(),
                    "offset", consumer.offsetForTimestamp(queue, Long.parseLong(options.get("time_ms"))));
                break;
            default: throw new IllegalArgumentException(command);
        }
    }

    /** The queues of the topic, or `queue` alone. */
    private List<MessageQueue> chosen(DefaultLitePullConsumer consumer) throws Exception {
        List<MessageQueue> queues = new ArrayList<>(consumer.fetchMessageQueues(options.get("topic")));
        int wanted = number("queue", -1);
        queues.removeIf(queue -> wanted >= 0 && queue.getQueueId() != wanted);
        return queues;
    }

    // ---- odds and ends

    private <T extends ClientConfig> T configured(T client) {
        client.setNamesrvAddr(options.get("ns"));
        client.setClientIP("127.0.0.1");
        client.setInstanceName(text("instance", "consuming-" + System.nanoTime()));
        client.setHeartbeatBrokerInterval(2_000); // see Driver.java
        client.setPollNameServerInterval(2_000); // else a topic that is made later is seen after up to 30 s
        return client;
    }

    private static void sleep(long ms) {
        try {
            Thread.sleep(ms);
        } catch (InterruptedException stop) {
            Thread.currentThread().interrupt();
        }
    }

    private String turn(String key, int i, String otherwise) {
        String[] values = text(key, otherwise).split(",");
        return values[i % values.length];
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
        if (value == null || value instanceof Number) return String.valueOf(value);
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
